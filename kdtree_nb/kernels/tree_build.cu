// tree_build: the B most probable prefixes under the drafter's marginals or conditionals, best first, by one warp.
//
// Idea      Every node has a slot for the best of its children that are not in the tree. A step takes the best of all
//           slots' children as the next node, moves its slot on to its next sibling, and fills the new node's slot with
//           its first child. Slots lie in 32 buckets of 32, and lane i holds the best of bucket i: a step is a maximum
//           over the buckets, then one over what is left in the bucket that has lost its best.
// Tables    With marginals a depth has one row of log-probabilities. With conditionals it has one for each of the K
//           tokens that the parent may be, and children says which of the depth's tokens a rank of that row is. The
//           whole block copies each row's first ranks to shared memory; later ones are read where they are.
// Pay       With costs the nodes that pay end where (1 + gain · Σ exp(score)) / cost is highest, summed in fp64 in the
//           tree's order. Now and then the search looks whether a later node can pay, were each as probable as the
//           next one: none is more probable. If not, it ends. What it has found beyond stays: a pass may have room.
// Grid      1 block, whole warps: the first one searches.
// Order     higher score first; equal scores by the lexicographically smaller path of ranks, a prefix before its
//           extensions. A score is one addition a node in the order of the path: no other tree is right.
#include "order.cuh"
#include "ptx.cuh"
#include "rate.cuh"
#include "reduce.cuh"
#include "turn.cuh"

constexpr int MAX_NODES = 1025;              // the root included
constexpr int SLOTS = 32 * 32;               // the last node's is never looked at
constexpr unsigned IMPOSSIBLE = 0x007fffff;  // the key of −inf, and of what is not there

struct Step {
    int parent, rank;  // the node above, and the place among its children
};
struct __align__(16) Node : Step {
    int depth, choice;
};
struct __align__(16) Child : Step {
    int choice;    // with children which of its depth's tokens, without the token
    unsigned key;  // its score, ordered
};
struct Best {
    unsigned key;
    int slot;
};

// Whether the path of ranks that ends with step a comes before that of b. Neither path is the start of the other: what
// is above a child in a slot has been taken.
__device__ bool comes_before(Step a, Step b, const Node* nodes)
{
    while (nodes[a.parent].depth > nodes[b.parent].depth)
        a = nodes[a.parent];
    while (nodes[b.parent].depth > nodes[a.parent].depth)
        b = nodes[b.parent];
    while (a.parent != b.parent) {
        a = nodes[a.parent];
        b = nodes[b.parent];
    }
    return a.rank < b.rank;
}

// Of one slot a lane, the best, for every lane. A tie is rare, and takes a tournament.
__device__ Best best_of(Best mine, const Child* slots, const Node* nodes)
{
    const unsigned highest = __reduce_max_sync(ALL_LANES, mine.key);
    const unsigned equal = __ballot_sync(ALL_LANES, mine.key == highest);
    int slot = __reduce_max_sync(ALL_LANES, mine.key == highest ? mine.slot : 0);
    if (highest > IMPOSSIBLE && (equal & (equal - 1))) {
        slot = mine.key == highest ? mine.slot : -1;
#pragma unroll 1
        for (int step = 16; step > 0; step /= 2) {
            const int other = __shfl_xor_sync(ALL_LANES, slot, step);
            if (other >= 0 && (slot < 0 || comes_before(slots[other], slots[slot], nodes)))
                slot = other;
        }
    }
    return {highest, slot};
}

__device__ Best better(Best a, Best b, const Child* slots, const Node* nodes)
{
    bool first = a.key > b.key;
    if (a.key == b.key && a.key > IMPOSSIBLE)
        first = comes_before(slots[a.slot], slots[b.slot], nodes);
    return first ? a : b;
}

extern "C" __global__ void __launch_bounds__(256)
tree_build(const int* root,                      // [1] the last committed token
           const float* log_probs,               // [·, width], descending; or
                                                 // [·, width, width] with children
           const int* token_ids,                 // [·, width]
           const int* children,                  // [·, width, width]; null: marginals
           const float* costs,                   // [budget + 1] seconds; null: all nodes pay
           const int* left,                      // [1] tokens that may be committed still; null: enough
           int* __restrict__ tokens,             // [budget + 1], −1 in padding
           int* __restrict__ parents,            // [budget + 1], −1 for the root, in padding
           int* __restrict__ depths,             // [budget + 1], −1 in padding
           float* __restrict__ scores,           // [budget + 1], −inf in padding
           int* __restrict__ num_nodes,          // [1]
           int* __restrict__ paying,             // [1] the first of them
           int most_depth, int width, int budget,
           int ranks,  // of a row that a tree within the budget can come to; in a chain 1
           int near,   // of them in shared memory
           double gain)
{
    take_turn();
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    __shared__ Node nodes[MAX_NODES];
    __shared__ float score[MAX_NODES];
    __shared__ Child slots[MAX_NODES];
    __shared__ int found;
    const int depth_limit = left ? max(0, min(most_depth, *left - 1)) : most_depth;
    const int rows = children ? depth_limit * width : depth_limit, lane = threadIdx.x;
    const int* choices = children ? children : token_ids;  // what a rank of a row is
    float* near_log_probs = reinterpret_cast<float*>(dynamic_shared);          // [rows, near]
    int* near_choices = reinterpret_cast<int*>(dynamic_shared) + rows * near;  // [rows, near]

    for (int i = threadIdx.x; i < rows * near; i += blockDim.x) {
        const long long at = (long long)(i / near) * width + i % near;
        cp_async_4(&near_log_probs[i], &log_probs[at]);
        cp_async_4(&near_choices[i], &choices[at]);
    }
    cp_async_commit();
    for (int i = threadIdx.x; i < SLOTS; i += blockDim.x)
        slots[i].key = IMPOSSIBLE;
    cp_async_wait<0>();
    __syncthreads();

    // A child of a node with this score, depth and choice.
    const auto child_of = [&](int parent, float parent_score, int depth, int choice, int rank) {
        const bool exists = depth < depth_limit && rank < ranks, is_near = rank < near;
        const unsigned row = children ? depth * width + choice : depth, stride = is_near ? near : width;
        const size_t at = exists ? size_t(row) * stride + rank : 0;
        const float sum = parent_score + (is_near ? near_log_probs : log_probs)[at];
        return Child{{parent, rank}, (is_near ? near_choices : choices)[at], exists ? ordered(sum) : IMPOSSIBLE};
    };

    if (threadIdx.x < 32) {
        // Every lane follows count, rate, and what is taken; best is that of the lane's own bucket. Lane 0 writes.
        int count = 1;
        Rate rate{gain, 0.0, -INFINITY, 0, 1};
        Best best{IMPOSSIBLE, 0};
        if (lane == 0) {
            nodes[0] = {{-1, 0}, 0, 0};
            score[0] = 0.0f;
            if (depth_limit > 0 && ranks > 0)
                slots[0] = child_of(0, 0.0f, 0, 0, 0);
            best = {slots[0].key, 0};
        }
        __syncwarp();
        while (true) {
            const Best taken = best_of(best, slots, nodes);
            bool ends = taken.key == IMPOSSIBLE || count > budget;
            if (costs && (ends || count % COUNTED == 0)) {
                count_nodes(rate, count, score, costs);
                ends = ends || !may_rise(rate, count, budget, exp(double(number_of(taken.key))), costs);
            }
            if (ends)
                break;
            const Node above = nodes[taken.slot];
            const Child child = slots[taken.slot];
            const float above_score = score[taken.slot], child_score = number_of(taken.key);
            // Even lanes see to the next sibling, odd ones to the first child.
            const bool odd = lane % 2;
            const Child opened = child_of(odd ? count : taken.slot, odd ? child_score : above_score, above.depth + odd,
                                          odd ? child.choice : above.choice, odd ? 0 : child.rank + 1);
            const int bucket = unsigned(taken.slot) / 32, beside = 32 * bucket + lane;
            const unsigned beside_key = beside == taken.slot ? IMPOSSIBLE : slots[beside].key;
            const Best left = best_of({beside_key, beside}, slots, nodes);
            __syncwarp();  // they have been read
            if (lane < 2)
                slots[opened.parent] = opened;
            if (lane == 0) {
                nodes[count] = {child, above.depth + 1, child.choice};
                score[count] = child_score;
            }
            __syncwarp();
            const Best sibling{__shfl_sync(ALL_LANES, opened.key, 0), taken.slot};
            const Best below{__shfl_sync(ALL_LANES, opened.key, 1), count};
            const Best remaining = better(sibling, left, slots, nodes);
            if (lane == bucket)
                best = remaining;
            if (lane == count / 32)
                best = better(below, best, slots, nodes);
            count += 1;
        }
        if (lane == 0) {
            *num_nodes = found = count;
            *paying = costs ? rate.paying : count;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i <= budget; i += blockDim.x) {
        const bool is_node = i < found;
        const Node node = nodes[i];
        const int token = i == 0 ? *root : !is_node ? -1 : node.choice;
        tokens[i] = children && is_node && i > 0 ? token_ids[(long long)(node.depth - 1) * width + token] : token;
        parents[i] = is_node ? node.parent : -1;
        depths[i] = is_node ? node.depth : -1;
        scores[i] = is_node ? score[i] : -INFINITY;
    }
}
