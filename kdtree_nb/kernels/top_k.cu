// top_k: the K most probable tokens of each row of logits, with their log-probabilities.
//
// Idea      A row is cut into segments. top_k_sums takes each segment's sum of exponentials. top_k joins a row's sums to
//           its logsumexp, so that every log-probability and its token become one 64-bit key, which sorts higher ones
//           first and equal ones, also where two logits differ and round to one, by the lower id; and it finds each
//           segment's K largest keys. Of these top_k_join finds the row's, and sorts them. A row of one segment is ready
//           after top_k. The K-th largest key is narrowed down, 8 bits a pass, from a histogram in shared memory, until
//           what it begins with tells the K largest from all others.
// Grid      (L, segments), in top_k_join (L); whole warps; how many depends on the size of the vocabulary alone.
// Invariant a row depends on itself alone: its segments lie at fixed places, sums have a fixed order, and its keys are
//           all different.
#include "order.cuh"
#include "reduce.cuh"
#include "turn.cuh"

constexpr int MAX_K = 1024;
constexpr int SEGMENT = 10240;
constexpr int MAX_THREADS = 1024;

// Of n different keys the k largest, in no order. The whole block takes part, and finds them in `found`.
template <class KeyAt> __device__ void select(int n, int k, KeyAt key_at, Key* found)
{
    __shared__ int histogram[256];
    __shared__ Key shared_prefix;
    __shared__ int shared_wanted, count;
    Key prefix = 0;        // leading digits of the k-th largest key
    int shift = 64;        // how many bits are behind them
    int wanted = k;        // of the keys that begin with them; 0 for all
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        histogram[i] = 0;
    if (threadIdx.x == 0)
        count = 0;
    while (wanted > 0) {
        shift -= 8;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const Key key = key_at(i);
            if (shift == 56 || (key ^ prefix) >> (shift + 8) == 0)
                atomicAdd(&histogram[key >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) {  // lane 0 has the 8 highest digits
            const int lowest = 8 * (31 - threadIdx.x);
            int here = 0;
            for (int digit = lowest; digit < lowest + 8; ++digit)
                here += histogram[digit];
            int above = here;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(ALL_LANES, above, step);
                above += threadIdx.x >= step ? other : 0;
            }
            above -= here;
            if (above < wanted && wanted <= above + here) {
                int digit = lowest + 7, left = wanted - above;
                while (histogram[digit] < left)
                    left -= histogram[digit--];
                shared_prefix = prefix | Key(digit) << shift;
                shared_wanted = histogram[digit] == left ? 0 : left;
            }
            for (int digit = lowest; digit < lowest + 8; ++digit)
                histogram[digit] = 0;
        }
        __syncthreads();
        prefix = shared_prefix;
        wanted = shared_wanted;
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const Key key = key_at(i);
        if (key >= prefix)
            found[atomicAdd(&count, 1)] = key;
    }
    __syncthreads();
}

// The result of a row: a key's place is the number of those that are larger.
__device__ void write_sorted(const Key* found, int k, float* log_probs, int* token_ids)
{
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        const Key key = found[i];
        int place = 0;
        for (int j = 0; j < k; ++j)
            place += found[j] > key;
        log_probs[place] = number_of(unsigned(key >> 32));
        token_ids[place] = int(0xffffffffu - unsigned(key));
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
top_k_sums(const float* logits,               // [L, vocab]
           float2* __restrict__ sums,         // [L, segments] the highest logit, Σ exp(logit − highest)
           int vocab)
{
    take_turn();
    const int first = blockIdx.y * SEGMENT, end = min(vocab, first + SEGMENT);
    const float* row = logits + size_t(blockIdx.x) * vocab;
    float mine[SEGMENT / MAX_THREADS];  // all on their way at once
    float highest = -INFINITY, sum = 0.0f;
    for (int j = 0; j < SEGMENT / MAX_THREADS; ++j) {
        const int i = first + j * blockDim.x + threadIdx.x;
        mine[j] = i < end ? row[i] : -INFINITY;
    }
    for (float logit : mine)
        highest = fmaxf(highest, logit);
    highest = block_max(highest);
    for (float logit : mine)
        sum += logit > -INFINITY ? expf(logit - highest) : 0.0f;  // 0 for NaN as well
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        sums[size_t(blockIdx.x) * gridDim.y + blockIdx.y] = {highest, sum};
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
top_k(const float* logits,               // [L, vocab]
      const float2* sums,                // [L, segments]
      Key* __restrict__ keys,            // [L, segments, k] if there is more than one, 0 where a segment has fewer
      float* __restrict__ log_probs,     // [L, k] if there is one
      int* __restrict__ token_ids,       // [L, k] the same
      int vocab, int k)
{
    take_turn();
    __shared__ Key found[MAX_K];
    const int segments = gridDim.y, first = blockIdx.y * SEGMENT, n = min(SEGMENT, vocab - first);
    const float* row = logits + size_t(blockIdx.x) * vocab;
    const float2* of_row = sums + size_t(blockIdx.x) * segments;

    float highest = -INFINITY, sum = 0.0f;  // every warp does the same
    for (int i = threadIdx.x % 32; i < segments; i += 32)
        highest = fmaxf(highest, of_row[i].x);
    highest = warp_max(highest);
    for (int i = threadIdx.x % 32; i < segments; i += 32)
        sum += of_row[i].y * expf(of_row[i].x - highest);
    const float log_sum = logf(warp_sum(sum));

    const int taken = min(k, n);
    select(n, taken, [&](int i) { return key_of(row[first + i] - highest - log_sum, first + i); }, found);
    if (segments == 1)
        return write_sorted(found, k, log_probs + size_t(blockIdx.x) * k, token_ids + size_t(blockIdx.x) * k);
    keys += (size_t(blockIdx.x) * segments + blockIdx.y) * k;
    for (int i = threadIdx.x; i < k; i += blockDim.x)
        keys[i] = i < taken ? found[i] : 0;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS)
top_k_join(const Key* keys,                // [L, segments, k]
           float* __restrict__ log_probs,  // [L, k]
           int* __restrict__ token_ids,    // [L, k]
           int segments, int k)
{
    take_turn();
    __shared__ Key found[MAX_K];
    keys += size_t(blockIdx.x) * segments * k;
    select(segments * k, k, [&](int i) { return keys[i]; }, found);
    write_sorted(found, k, log_probs + size_t(blockIdx.x) * k, token_ids + size_t(blockIdx.x) * k);
}
