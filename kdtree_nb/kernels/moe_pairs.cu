// moe_pairs: before the products of a layer's experts the pairs of a token and an expert are sorted, after them summed.
//
// Idea      moe_sort counts each expert's pairs, adds up the blocks of rows that they fill, and puts them there: all in
//           one block, a thread an expert. moe_sum adds a token's experts in the order of its choice.
// Grid      moe_sort: 1, at least as many threads as experts, whole warps. moe_sum: (tokens, columns / threads).
// Invariant The order of an expert's pairs is left to chance, as a product's row does not depend on the rows beside it;
//           a token's sum has the router's order.
#include "reduce.cuh"
#include "turn.cuh"

constexpr int MAX_EXPERTS = 1024;
constexpr int AT_ONCE = 12;  // outputs that moe_sum asks for before it adds the first: all that a token has, mostly

extern "C" __global__ void moe_sort(const int* expert_ids,               // [pairs]
                                    int* __restrict__ block_experts,     // [max_blocks]
                                    int* __restrict__ block_pairs,       // [max_blocks, rows], −1: no pair
                                    int* __restrict__ num_blocks,        // [1]
                                    int pairs, int rows)
{
    take_turn();
    __shared__ int next[MAX_EXPERTS];  // how many pairs an expert has; then the place of its next one
    __shared__ int of_warp[32];
    const int expert = threadIdx.x, lane = expert % 32, warp = expert / 32;
    next[expert] = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x)
        atomicAdd(&next[expert_ids[pair]], 1);
    __syncthreads();

    const int count = next[expert], blocks = (count + rows - 1) / rows;
    int end = blocks;  // becomes the number of blocks of all experts up to this one
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(ALL_LANES, end, step);
        if (lane >= step)
            end += before;
    }
    if (lane == 31)
        of_warp[warp] = end;
    __syncthreads();
    for (int w = 0; w < warp; ++w)
        end += of_warp[w];

    const int first = end - blocks;
    next[expert] = first * rows;
    for (int block = first; block < end; ++block)
        block_experts[block] = expert;
    for (int at = first * rows + count; at < end * rows; ++at)
        block_pairs[at] = -1;
    if (expert == blockDim.x - 1)
        *num_blocks = end;
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x)
        block_pairs[atomicAdd(&next[expert_ids[pair]], 1)] = pair;
}

extern "C" __global__ void moe_sum(const float* outputs,                      // [tokens, top_k, hidden]
                                   const float* router_weights,               // [tokens, top_k]
                                   const float* shared,                       // [tokens, hidden] or null: added last
                                   float* __restrict__ y,                     // [tokens, hidden]
                                   int hidden, int top_k)
{
    take_turn();
    const size_t token = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= hidden)
        return;
    const float last = shared ? shared[token * hidden + i] : 0.0f;
    float sum = 0.0f;
    for (int first = 0; first < top_k; first += AT_ONCE) {
        const float* from = outputs + (token * top_k + first) * hidden + i;
        const float* weights = router_weights + token * top_k + first;
        float output[AT_ONCE], weight[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (first + k < top_k) {
                output[k] = from[size_t(k) * hidden];
                weight[k] = weights[k];
            }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
            if (first + k < top_k)
                sum += output[k] * weight[k];
    }
    y[token * hidden + i] = shared ? sum + last : sum;
}
