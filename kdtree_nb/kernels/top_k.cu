// top_k: the K most probable tokens of each row of logits, with their log-probabilities.
//
// Idea      The logsumexp comes first. A log-probability and its token become one 64-bit key that sorts higher ones
//           first and equal ones, also where two logits differ and round to one, by the lower id. A radix select
//           narrows the K-th largest key down, 8 bits a pass, from a histogram in shared memory; the keys from it on
//           are gathered and sorted.
// Grid      (L), whole warps; how many depends on the size of the vocabulary alone.
// Invariant a row depends on itself alone; its sum has a fixed order, and its keys are all different.
#include "order.cuh"
#include "reduce.cuh"

constexpr int MAX_K = 1024;


extern "C" __global__ void top_k(const float* __restrict__ logits,  // [L, vocab]
                                 float* __restrict__ log_probs,     // [L, k]
                                 int* __restrict__ token_ids,       // [L, k]
                                 int vocab, int k)
{
    __shared__ int histogram[256];
    __shared__ Key found[MAX_K];
    __shared__ Key prefix;        // leading digits of the k-th largest key
    __shared__ int wanted, count; // keys still to find below the prefix; keys gathered
    const float* row = logits + size_t(blockIdx.x) * vocab;

    float highest = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x)
        highest = fmaxf(highest, row[i]);
    highest = block_max(highest);
    for (int i = threadIdx.x; i < vocab; i += blockDim.x)
        sum += isnan(row[i]) ? 0.0f : expf(row[i] - highest);
    const float log_sum = logf(block_sum(sum));

    if (threadIdx.x == 0) {
        prefix = 0;
        wanted = k;
        count = 0;
    }
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x)
            histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            const Key key = key_of(row[i] - highest - log_sum, i);
            if (shift == 56 || key >> (shift + 8) == prefix >> (shift + 8))
                atomicAdd(&histogram[key >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255;
            while (histogram[digit] < wanted)
                wanted -= histogram[digit--];
            prefix |= Key(digit) << shift;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        const Key key = key_of(row[i] - highest - log_sum, i);
        if (key >= prefix)
            found[atomicAdd(&count, 1)] = key;
    }
    int size = 1;
    while (size < k)
        size *= 2;
    for (int i = k + threadIdx.x; i < size; i += blockDim.x)
        found[i] = 0;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2)  // bitonic sort, largest first
        for (int step = run / 2; step > 0; step /= 2) {
            for (int i = threadIdx.x; i < size; i += blockDim.x) {
                const int other = i ^ step;
                if (other > i && (found[i] < found[other]) == ((i & run) == 0)) {
                    const Key swap = found[i];
                    found[i] = found[other];
                    found[other] = swap;
                }
            }
            __syncthreads();
        }
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        log_probs[size_t(blockIdx.x) * k + i] = number_of(unsigned(found[i] >> 32));
        token_ids[size_t(blockIdx.x) * k + i] = int(0xffffffffu - unsigned(found[i]));
    }
}
