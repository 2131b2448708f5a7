// condition: the log-probabilities of a depth's candidates, given one candidate of the depth above, best first.
//
// Idea      The parent's gated row is made once, in shared memory. A warp takes a candidate at a time and multiplies the
//           two rows; then each thread has one candidate: two sums over the block give Z, and a candidate's place in
//           the row is the number of those that come before it.
// Grid      (L · K), MAX_K threads: a block for each depth and parent.
// Invariant a row depends on its depth's marginals and its parent alone; every sum has a fixed order.
// NaN       counts as −inf, wherever it comes from.
#include "reduce.cuh"
#include "turn.cuh"

constexpr int MAX_K = 256;  // and the threads of a block: each has one candidate, and one number of the parent's row
constexpr int MAX_RANK = 256;

extern "C" __global__ void condition(const float* log_probs,                  // [L, width] marginals
                                     const int* token_ids,                    // [L, width]
                                     const float* gates,                      // [L, rank]
                                     const float* __restrict__ parent_table,  // [vocab, rank]
                                     const float* __restrict__ child_table,   // [vocab, rank]
                                     float* __restrict__ conditionals,        // [L, width, width], descending
                                     int* __restrict__ children,              // [L, width, width]
                                     int width, int rank)
{
    take_turn();
    __shared__ float hidden[MAX_RANK];
    __shared__ float value[MAX_K];  // of each candidate: its score, then its log-probability
    const int depth = blockIdx.x / width, parent = blockIdx.x % width, thread = threadIdx.x;
    const float* marginals = log_probs + size_t(depth) * width;
    const int* tokens = token_ids + size_t(depth) * width;

    // The root is the only parent at depth 0; deeper, one that is no candidate has no children.
    const bool has_children = depth > 0 ? marginals[parent - width] > -INFINITY : parent == 0;
    float log_prob = -INFINITY;
    if (has_children && thread < width && marginals[thread] > -INFINITY)  // false for NaN as well
        log_prob = marginals[thread];

    if (depth > 0 && has_children) {
        const float* parent_row = parent_table + size_t(tokens[parent - width]) * rank;
        if (thread < rank) {
            const float gated = parent_row[thread] + gates[size_t(depth) * rank + thread];
            hidden[thread] = gated * (1.0f / (1.0f + expf(-gated)));
        }
        __syncthreads();
        for (int j = thread / 32; j < width; j += MAX_K / 32) {
            float score = 0.0f;
            if (marginals[j] > -INFINITY) {
                const float* child_row = child_table + size_t(tokens[j]) * rank;
                for (int k = thread % 32; k < rank; k += 32)
                    score = fmaf(hidden[k], child_row[k], score);
            }
            score = warp_sum(score);
            if (thread % 32 == 0)
                value[j] = score;
        }
        __syncthreads();

        float adjusted = -INFINITY;
        if (thread < width && log_prob + value[thread] > -INFINITY)
            adjusted = log_prob + value[thread];
        const float tail = logf(fmaxf(0.0f, 1.0f - block_sum(expf(log_prob))));  // a candidate that no score moves
        const float highest = fmaxf(block_max(adjusted), tail);
        const float sum = block_sum(expf(adjusted - highest)) + expf(tail - highest);
        log_prob = adjusted - highest - logf(sum);
        log_prob = log_prob > -INFINITY ? fminf(log_prob, 0.0f) : -INFINITY;
    }

    if (thread < width)
        value[thread] = log_prob;
    __syncthreads();
    if (thread < width) {
        int place = 0;
        for (int j = 0; j < width; ++j)
            place += value[j] > log_prob || (value[j] == log_prob && j < thread);
        const size_t at = size_t(blockIdx.x) * width + place;
        conditionals[at] = log_prob;
        children[at] = thread;
    }
}
