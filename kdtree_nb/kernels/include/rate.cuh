// rate.cuh: the tokens per second that a tree's first nodes promise, and where they are most; for one warp.
#pragma once

#include "reduce.cuh"

constexpr int COUNTED = 8;  // nodes from one look at the costs to the next, at most 32

struct Rate {
    double gain;            // tokens that are accepted for each that probabilities promise
    double expected, best;  // tokens of a round, tokens per second
    int counted, paying;    // nodes: whose probabilities are in expected, with which the rate is best
};

// Add the nodes that are not counted yet, at most 32, in their order, and see where the rate was highest.
__device__ void count_nodes(Rate& rate, int nodes, const float* score, const float* costs)
{
    const int node = rate.counted + threadIdx.x;
    const double probability = node < nodes ? (node ? rate.gain : 1.0) * exp(double(score[node])) : 0.0;
    double of_node = -INFINITY;
    for (int i = rate.counted; i < nodes; ++i) {
        rate.expected += __shfl_sync(ALL_LANES, probability, i - rate.counted);
        if (i == node)
            of_node = rate.expected;
    }
    if (node < nodes)
        of_node /= costs[node];
    double highest = of_node;
    for (int step = 16; step > 0; step /= 2)
        highest = fmax(highest, __shfl_xor_sync(ALL_LANES, highest, step));
    const unsigned where = __ballot_sync(ALL_LANES, of_node == highest);
    if (highest > rate.best) {
        rate.best = highest;
        rate.paying = rate.counted + __ffs(where);
    }
    rate.counted = nodes;
}

// Whether more nodes can have a higher rate, if none of them is more probable than `most`.
__device__ bool may_rise(const Rate& rate, int nodes, int budget, double most, const float* costs)
{
    bool rises = false;  // 1e-9 is far more than what fp64 rounds off
    for (int i = nodes + threadIdx.x; i <= budget; i += 32)
        rises |= (rate.expected + (i + 1 - nodes) * rate.gain * most) * (1 + 1e-9) > rate.best * costs[i];
    return __any_sync(ALL_LANES, rises);
}
