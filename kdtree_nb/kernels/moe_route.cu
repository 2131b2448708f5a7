// moe_route: each token's experts and their weights, from the router's logits.
//
// Idea      The score with its bias chooses, the score alone weighs: a thread an expert. One warp then chooses in top_k
//           rounds, each of which takes the best expert that is left: highest score first, equal ones by the lowest id.
//           A lane knows the best of its own experts; only the one whose expert was taken looks for its next. Experts
//           that every token has are written behind the choice. (Loops are not unrolled: the kernel runs once a
//           layer, and waits for its code as well.)
//           What shared experts that are not among the others make of their gates and ups depends on the same product:
//           further blocks do that meanwhile, a thread an element. A token alone needs no sorting (moe_pairs.cu): each of
//           its experts is a block of one pair.
// Grid      (tokens, 1 + width / threads), whole warps.
// Invariant a token's choice depends on its own logits; the weights are added in the order of the choice.
#include <cuda_bf16.h>

#include "order.cuh"
#include "reduce.cuh"
#include "swiglu.cuh"
#include "turn.cuh"

constexpr int MAX_EXPERTS = 1024;
constexpr unsigned TAKEN = 0;  // less than any number's place in the order
constexpr unsigned LOWEST = 0x007fffff;  // that of −inf, and of NaN: it can be chosen still

struct Best {
    unsigned place;
    int id;
};

// The best of a lane's own: every 32nd of so many.
__device__ __forceinline__ Best own_best(const unsigned* places, int count)
{
    Best best{TAKEN, 0x7fffffff};
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += 32)
        if (places[i] > best.place)
            best = {places[i], i};
    return best;
}

// Take the best of a warp's, of equal ones the lowest id; its lane finds its next. Returns the id.
__device__ __forceinline__ int take_best(Best& own, unsigned* places, int count)
{
    const unsigned highest = __reduce_max_sync(ALL_LANES, own.place);
    const int id = __reduce_min_sync(ALL_LANES, own.place == highest ? own.id : 0x7fffffff);
    if (own.id == id) {
        places[id] = TAKEN;
        own = own_best(places, count);
    }
    return id;
}

extern "C" __global__ void moe_route(const float* logits,               // [tokens, experts], row_stride apart
                                     const float* __restrict__ bias,    // [experts]
                                     int* __restrict__ expert_ids,      // [tokens, top_k + shared]
                                     float* __restrict__ weights,       // [tokens, top_k + shared]
                                     int experts, int top_k, int shared, int groups, int top_groups, int normalize,
                                     float scaling, long long row_stride,
                                     const float* gate_up,              // [tokens, 2 · width], row_stride apart; or null
                                     OUT* __restrict__ activations,     // [tokens, width], float or bfloat16
                                     int width,
                                     int* block_experts, int* block_pairs, int* num_blocks,  // of one token; or null
                                     int rows)
{
    take_turn();
    if (blockIdx.y > 0) {
        const size_t row = blockIdx.x;
        const int i = (blockIdx.y - 1) * blockDim.x + threadIdx.x;
        const float* gate = gate_up + row * row_stride + i;
        if (i < width)
            activations[row * width + i] = OUT(swiglu_of(gate[0], gate[width]));
        return;
    }
    __shared__ float score[MAX_EXPERTS];
    __shared__ unsigned choice[MAX_EXPERTS], group_choice[MAX_EXPERTS];
    __shared__ int chosen[MAX_EXPERTS];
    const size_t token = blockIdx.x;
#pragma unroll 1
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        const float logit = logits[token * row_stride + e], shift = bias[e];
        score[e] = 1.0f / (1.0f + expf(-logit));
        choice[e] = ordered(score[e] + shift);
    }
    __syncthreads();
    if (groups > 1) {
        const int size = experts / groups;
#pragma unroll 1
        for (int g = threadIdx.x; g < groups; g += blockDim.x) {  // worth the sum of its two best choices
            unsigned first = LOWEST, second = LOWEST;
#pragma unroll 4
            for (int e = g * size; e < (g + 1) * size; ++e) {
                second = max(second, min(first, choice[e]));
                first = max(first, choice[e]);
            }
            group_choice[g] = ordered(size > 1 ? number_of(second) + number_of(first) : number_of(first));
        }
        __syncthreads();
    }
    if (threadIdx.x >= 32)
        return;

    const int lane = threadIdx.x;
    if (groups > 1) {
        const int size = experts / groups;
        Best own = own_best(group_choice, groups);
#pragma unroll 1
        for (int round = 0; round < groups; ++round) {
            const int group = take_best(own, group_choice, groups);
#pragma unroll 1
            for (int e = group * size + lane; round >= top_groups && e < (group + 1) * size; e += 32)
                choice[e] = LOWEST;
        }
        __syncwarp();
    }

    Best own = own_best(choice, experts);
    float sum = 0.0f;
#pragma unroll 1
    for (int k = 0; k < top_k; ++k) {
        const int id = take_best(own, choice, experts);
        if (lane == 0)
            chosen[k] = id;
        sum += score[id];
    }
    __syncwarp();
    expert_ids += token * (top_k + shared);
    weights += token * (top_k + shared);
#pragma unroll 1
    for (int k = lane; k < top_k; k += 32) {
        expert_ids[k] = chosen[k];
        weights[k] = (normalize ? score[chosen[k]] / (sum + 1e-20f) : score[chosen[k]]) * scaling;
    }
#pragma unroll 1
    for (int k = lane; k < shared; k += 32) {
        expert_ids[top_k + k] = experts + k;
        weights[top_k + k] = 1.0f;
    }
    if (!block_experts)
        return;
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < (top_k + shared) * rows; i += 32) {
        const int k = i / rows;
        block_pairs[i] = i % rows ? -1 : k;
        if (i % rows == 0)
            block_experts[k] = k < top_k ? chosen[k] : experts + k - top_k;
    }
    if (lane == 0)
        *num_blocks = top_k + shared;
}
