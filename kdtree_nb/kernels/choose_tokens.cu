// choose_tokens: the target's token after each row of logits: the argmax, or a sample of the softmax, cut to the most
// probable tokens by top_k and top_p.
//
// Idea      A sample inverts the cumulative distribution, in fp64, at a random number that belongs to the row's
//           position: Philox4x64-10 with the position as counter, NumPy's generator to the bit. Each thread sums one
//           stretch of the vocabulary, thread 0 the stretches, and the thread whose stretch it is finds the token.
//           A cut is a key, and no token below it is kept. Both are found alike, 4 bits at a time: where masses summed
//           from the largest key down reach a goal, each token's mass being 1 for top_k, its weight for top_p.
// Grid      (N), 256 threads. How to choose lies in device memory, so that a CUDA graph serves every seed.
// Invariant a row depends on its logits, its position and the seed; every sum has a fixed order, and those that decide
//           a cut are of whole numbers, so that no order would change them.
#include "order.cuh"
#include "turn.cuh"

constexpr int THREADS = 256;

constexpr double MASS_UNITS = 1099511627776.0;  // 2^40: what a weight of 1 counts for top_p

typedef unsigned long long Word;

struct Sampling {  // as Sampling.words() in choose_tokens.py lays it out
    double temperature;
    Word seed;
    long long top_k;  // 0 keeps all
    double top_p;     // 1 keeps all
};

// The first number in [0, 1) that numpy.random.Philox(counter=position, key=seed) gives.
__device__ double uniform(Word seed, Word position)
{
    Word counter[4] = {position + 1, 0, 0, 0};  // NumPy counts before it draws
    Word key[2] = {seed, 0};
    for (int round = 0; round < 10; ++round) {
        const Word a = 0xD2E7470EE14C6C93ull, b = 0xCA5A826395121157ull;
        const Word high_a = __umul64hi(a, counter[0]), low_a = a * counter[0];
        const Word high_b = __umul64hi(b, counter[2]), low_b = b * counter[2];
        counter[0] = high_b ^ counter[1] ^ key[0];
        counter[1] = low_b;
        counter[2] = high_a ^ counter[3] ^ key[1];
        counter[3] = low_a;
        key[0] += 0x9E3779B97F4A7C15ull;
        key[1] += 0xBB67AE8584CAA73Bull;
    }
    return double(counter[0] >> 11) * (1.0 / 9007199254740992.0);
}

// The key at which the masses of the tokens, summed from the largest key down, reach goal(their sum over all tokens).
// sums: by digit, in shared memory, a column for each thread so that none waits for another.
template <class Mass, class Goal>
__device__ Key crossing(const float* row, int vocab, Word (*sums)[THREADS], Mass mass, Goal goal)
{
    const int thread = threadIdx.x;
    Key prefix = 0;  // leading digits of the key
    Word above = 0;  // masses of all keys that lead with larger digits
    double wanted = 0;
    for (int shift = 60; shift >= 0; shift -= 4) {
        for (int digit = 0; digit < 16; ++digit)
            sums[digit][thread] = 0;
        for (int i = thread; i < vocab; i += THREADS) {
            const Key key = key_of(row[i], i);
            if (shift == 60 || key >> (shift + 4) == prefix >> (shift + 4))
                sums[key >> shift & 15][thread] += mass(i, key);
        }
        for (int step = THREADS / 2; step > 0; step /= 2) {
            __syncthreads();
            if (thread < step)
                for (int digit = 0; digit < 16; ++digit)
                    sums[digit][thread] += sums[digit][thread + step];
        }
        __syncthreads();
        if (shift == 60) {
            Word total = 0;
            for (int digit = 0; digit < 16; ++digit)
                total += sums[digit][0];
            wanted = goal(double(total));
        }
        int digit = 15;
        while (double(above + sums[digit][0]) < wanted)
            above += sums[digit--][0];
        prefix |= Key(digit) << shift;
        __syncthreads();
    }
    return prefix;
}

extern "C" __global__ void choose_tokens(const float* logits,                    // [N, vocab]
                                         const int* prefix_len,                  // [1]
                                         const int* depths,                      // [N], −1 in padding
                                         const Sampling* sampling,               // [1]
                                         int* __restrict__ targets,              // [N]
                                         int vocab)
{
    take_turn();
    __shared__ float best_logit[THREADS];
    __shared__ int best_id[THREADS];
    __shared__ double sums[THREADS];
    __shared__ Word digit_sums[16][THREADS];
    const float* row = logits + size_t(blockIdx.x) * vocab;
    const int thread = threadIdx.x;
    const Sampling how = *sampling;

    float best = -INFINITY;
    int id = thread;
    for (int i = thread; i < vocab; i += THREADS)
        if (row[i] > best) {
            best = row[i];
            id = i;
        }
    best_logit[thread] = best;
    best_id[thread] = id;
    for (int step = THREADS / 2; step > 0; step /= 2) {
        __syncthreads();
        const int other = thread + step;
        if (thread < step && (best_logit[other] > best_logit[thread] ||
                              (best_logit[other] == best_logit[thread] && best_id[other] < best_id[thread]))) {
            best_logit[thread] = best_logit[other];
            best_id[thread] = best_id[other];
        }
    }
    __syncthreads();
    if (how.temperature == 0 || isinf(best_logit[0])) {
        if (thread == 0)
            targets[blockIdx.x] = best_id[0];
        return;
    }

    const double highest = best_logit[0];
    Key cut = 0;
    const auto weight = [&](int i, Key key) {
        return key < cut || isnan(row[i]) ? 0.0 : exp((row[i] - highest) / how.temperature);
    };
    if (0 < how.top_k && how.top_k < vocab)
        cut = crossing(
            row, vocab, digit_sums, [](int, Key) { return Word(1); }, [=](double) { return double(how.top_k); });
    if (how.top_p < 1)
        cut = crossing(
            row, vocab, digit_sums, [&](int i, Key key) { return Word(rint(weight(i, key) * MASS_UNITS)); },
            [=](double total) { return how.top_p * total; });

    const int stretch = (vocab + THREADS - 1) / THREADS, first = thread * stretch;
    const int end = min(first + stretch, vocab);
    double sum = 0;
    for (int i = first; i < end; ++i)
        sum += weight(i, key_of(row[i], i));
    sums[thread] = sum;
    __syncthreads();
    if (thread == 0)
        for (int t = 1; t < THREADS; ++t)
            sums[t] += sums[t - 1];
    __syncthreads();
    const double threshold = uniform(how.seed, *prefix_len + max(depths[blockIdx.x], 0)) * sums[THREADS - 1];
    const double before = thread ? sums[thread - 1] : 0;
    if (before <= threshold && threshold < sums[thread]) {
        double cumulative = before;
        int token = first;
        for (int i = first; i < end && cumulative <= threshold; ++i) {
            const double mass = weight(i, key_of(row[i], i));
            cumulative += mass;
            if (mass > 0)  // the last of the stretch that can be chosen, should its sum round to the threshold
                token = i;
        }
        targets[blockIdx.x] = token;
    }
}
