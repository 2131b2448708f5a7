// moe_route: each token's experts and their weights, from the router's logits.
//
// Idea      One warp a token. The score with its bias chooses, the score alone weighs. top_k rounds each take the
//           best expert that is left: highest score first, equal ones by the lowest id. Experts that every token has
//           are written behind them.
// Grid      (tokens), 32 threads.
// Invariant a token's choice depends on its own logits; the weights are added in the order of the choice.
#include "reduce.cuh"

constexpr int MAX_EXPERTS = 1024;

struct Best {
    float score;
    int id;
};

// The highest score over a warp, of equal ones the lowest id.
__device__ Best warp_best(Best mine)
{
    for (int step = 16; step > 0; step /= 2) {
        const float score = __shfl_xor_sync(ALL_LANES, mine.score, step);
        const int id = __shfl_xor_sync(ALL_LANES, mine.id, step);
        if (score > mine.score || (score == mine.score && id < mine.id))
            mine = {score, id};
    }
    return mine;
}

// A score that can be chosen: NaN means taken, below.
__device__ __forceinline__ float open_score(float score) { return isnan(score) ? -INFINITY : score; }

// The best of count scores; NaN never wins.
__device__ Best best_of(const float* scores, int count)
{
    Best mine{-INFINITY, 0x7fffffff};
    for (int i = threadIdx.x; i < count; i += 32)
        if (scores[i] > mine.score || (scores[i] == mine.score && i < mine.id))
            mine = {scores[i], i};
    return warp_best(mine);
}

extern "C" __global__ void moe_route(const float* __restrict__ logits,  // [tokens, experts]
                                     const float* __restrict__ bias,    // [experts]
                                     int* __restrict__ expert_ids,      // [tokens, top_k + shared]
                                     float* __restrict__ weights,       // [tokens, top_k + shared]
                                     int experts, int top_k, int shared, int groups, int top_groups, int normalize,
                                     float scaling)
{
    __shared__ float score[MAX_EXPERTS], choice[MAX_EXPERTS], group_score[MAX_EXPERTS];
    __shared__ int chosen[MAX_EXPERTS];
    const int lane = threadIdx.x;
    const size_t token = blockIdx.x;
    for (int e = lane; e < experts; e += 32) {
        score[e] = 1.0f / (1.0f + expf(-logits[token * experts + e]));
        choice[e] = open_score(score[e] + bias[e]);
    }
    __syncwarp();

    if (groups > 1) {
        const int size = experts / groups;
        for (int g = lane; g < groups; g += 32) {  // a group's score: the sum of its two best choices
            float first = -INFINITY, second = -INFINITY;
            for (int e = g * size; e < (g + 1) * size; ++e) {
                second = fmaxf(second, fminf(first, choice[e]));
                first = fmaxf(first, choice[e]);
            }
            group_score[g] = open_score(size > 1 ? second + first : first);
        }
        __syncwarp();
        for (int round = 0; round < groups; ++round) {
            const int group = best_of(group_score, groups).id;
            for (int e = group * size + lane; round >= top_groups && e < (group + 1) * size; e += 32)
                choice[e] = -INFINITY;
            __syncwarp();
            if (lane == 0)
                group_score[group] = NAN;  // taken
            __syncwarp();
        }
    }

    float sum = 0.0f;
    for (int k = 0; k < top_k; ++k) {
        const Best best = best_of(choice, experts);
        if (lane == 0) {
            chosen[k] = best.id;
            choice[best.id] = NAN;
        }
        sum += score[best.id];
        __syncwarp();
    }
    expert_ids += token * (top_k + shared);
    weights += token * (top_k + shared);
    for (int k = lane; k < top_k; k += 32) {
        expert_ids[k] = chosen[k];
        weights[k] = (normalize ? score[chosen[k]] / (sum + 1e-20f) : score[chosen[k]]) * scaling;
    }
    for (int k = lane; k < shared; k += 32) {
        expert_ids[top_k + k] = experts + k;
        weights[top_k + k] = 1.0f;
    }
}
