// tree_build: the B most probable prefixes under the drafter's marginals or conditionals, best first, by one warp.
//
// Idea      Every node has a slot for the best of its children that are not in the tree. A step takes the best of all
//           slots' children as the next node, moves its slot on to its next sibling, and fills the new node's slot with
//           its first child. Slots lie in 32 buckets of 32, and lane i holds the best of bucket i: a step is a maximum
//           over the buckets, then one over what is left in the bucket that has lost its best.
// Tables    With marginals a depth has one row of log-probabilities. With conditionals it has one for each of the K
//           tokens that the parent may be, and children says which of the depth's tokens a rank of that row is. The
//           whole block copies each row's first ranks to shared memory; later ones are read where they are.
// Cut       With costs the tree ends where (1 + Σ exp(score)) / cost is highest, summed in fp64 in the tree's order.
//           The search ends once no later node can pay, were each as probable as the next: none is more probable.
// Grid      1 block, whole warps: the first one searches.
// Order     higher score first; equal scores by the lexicographically smaller path of ranks, a prefix before its
//           extensions. A score is one addition a node in the order of the path: no other tree is right.
#include "order.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

constexpr int MAX_NODES = 1025;  // the root included
constexpr int SLOTS = 32 * 32;   // the last node's is never looked at
constexpr int COUNTED = 16;      // nodes from one look at the costs to the next, at most 32

struct Step {
    int parent, rank;  // the node above, and the place among its children
};
struct __align__(16) Node : Step {
    int depth, token;  // which of its depth's
};
struct __align__(16) Child : Step {
    int token;
    unsigned key;  // the order of its score; 0 if it is impossible
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

// Of one slot a lane, the best. A tie is rare, and takes a tournament.
__device__ Best best_of(Best mine, const Child* slots, const Node* nodes)
{
    const unsigned highest = __reduce_max_sync(ALL_LANES, mine.key);
    const unsigned equal = __ballot_sync(ALL_LANES, mine.key == highest);
    int slot = __shfl_sync(ALL_LANES, mine.slot, __ffs(equal) - 1);
    if (highest > 0 && (equal & (equal - 1))) {
        slot = mine.key == highest ? mine.slot : -1;
        for (int step = 16; step > 0; step /= 2) {
            const int other = __shfl_xor_sync(ALL_LANES, slot, step);
            if (other >= 0 && (slot < 0 || comes_before(slots[other], slots[slot], nodes)))
                slot = other;
        }
    }
    return {highest, slot};
}

extern "C" __global__ void tree_build(const int* __restrict__ root,         // [1] the last committed token
                                      const float* __restrict__ log_probs,  // [·, width], descending; or
                                                                            // [·, width, width] with children
                                      const int* __restrict__ token_ids,    // [·, width]
                                      const int* __restrict__ children,     // [·, width, width]; null: marginals
                                      const float* __restrict__ costs,      // [budget + 1] seconds; null: no cut
                                      int* __restrict__ tokens,             // [budget + 1], −1 in padding
                                      int* __restrict__ parents,            // [budget + 1], −1 for the root, in padding
                                      int* __restrict__ depths,             // [budget + 1], −1 in padding
                                      float* __restrict__ scores,           // [budget + 1], −inf in padding
                                      int* __restrict__ num_nodes,          // [1]
                                      int depth_limit, int width, int budget,
                                      int ranks,   // of a row that a tree within the budget can come to
                                      int staged)  // of them in shared memory
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    __shared__ Node nodes[MAX_NODES];
    __shared__ float score[MAX_NODES];
    __shared__ Child slots[MAX_NODES];
    __shared__ int kept;
    const int rows = children ? depth_limit * width : depth_limit, lane = threadIdx.x;
    float* staged_log_probs = reinterpret_cast<float*>(dynamic_shared);         // [rows, staged]
    int* staged_children = reinterpret_cast<int*>(dynamic_shared) + rows * staged;  // the same, with children

    for (int i = threadIdx.x; i < rows * staged; i += blockDim.x) {
        const size_t at = size_t(i / staged) * width + i % staged;
        cp_async_4(&staged_log_probs[i], &log_probs[at]);
        if (children)
            cp_async_4(&staged_children[i], &children[at]);
    }
    cp_async_commit();
    for (int i = threadIdx.x; i < SLOTS; i += blockDim.x)
        slots[i].key = 0;
    cp_async_wait<0>();
    __syncthreads();

    // The child of a node with this score, depth and token.
    const auto child_of = [&](int parent, float parent_score, int depth, int token, int rank) {
        Child child{{parent, rank}, rank, 0};
        if (depth < depth_limit && rank < ranks) {
            const int row = children ? depth * width + token : depth;
            const size_t at = size_t(row) * width + rank;
            const bool near = rank < staged;
            const float sum = parent_score + (near ? staged_log_probs[row * staged + rank] : log_probs[at]);
            if (children)
                child.token = near ? staged_children[row * staged + rank] : children[at];
            if (sum > -INFINITY)  // false for NaN as well
                child.key = ordered(sum);
        }
        return child;
    };

    if (threadIdx.x < 32) {
        // Every lane follows all of these but best, which is its bucket's; lane 0 writes.
        int count = 1, counted = 0, cut = 1;
        double expected = 0.0, best_rate = -INFINITY;
        Best best{0, 0};
        const auto offer = [&](const Child& child) {
            const int slot = child.parent;
            if (child.key > best.key || (child.key > 0 && child.key == best.key &&
                                         comes_before(child, slots[best.slot], nodes)))
                best = {child.key, slot};
        };
        // Add the nodes that are not counted to what is expected, one by one, and see where the rate was highest.
        const auto count_nodes = [&] {
            const int node = counted + lane;
            const double probability = node < count ? exp(double(score[node])) : 0.0;
            double rate = -INFINITY;
            for (int i = counted; i < count; ++i) {
                expected += __shfl_sync(ALL_LANES, probability, i - counted);
                if (i == node)
                    rate = expected;
            }
            if (node < count)
                rate /= costs[node];
            double highest = rate;
            for (int step = 16; step > 0; step /= 2)
                highest = fmax(highest, __shfl_xor_sync(ALL_LANES, highest, step));
            const unsigned where = __ballot_sync(ALL_LANES, rate == highest);
            if (highest > best_rate) {
                best_rate = highest;
                cut = counted + __ffs(where);
            }
            counted = count;
        };

        const Child first = child_of(0, 0.0f, 0, 0, 0);
        if (lane == 0) {
            nodes[0] = {{-1, 0}, 0, 0};
            score[0] = 0.0f;
            slots[0] = first;
            best = {first.key, 0};
        }
        __syncwarp();
        while (count <= budget) {
            const Best taken = best_of(best, slots, nodes);
            if (taken.key == 0)
                break;
            if (costs && count % COUNTED == 0) {
                count_nodes();
                const double most = exp(double(number_of(taken.key)));
                bool pays = false;  // 1e-9 is far more than what fp64 rounds off
                for (int i = count + lane; i <= budget; i += 32)
                    pays |= (expected + (i + 1 - count) * most) * (1 + 1e-9) > best_rate * costs[i];
                if (!__any_sync(ALL_LANES, pays))
                    break;
            }
            const Node above = nodes[taken.slot];
            const Child child = slots[taken.slot];
            const float above_score = score[taken.slot], child_score = number_of(taken.key);
            const int beside = taken.slot / 32 * 32 + lane;
            const unsigned beside_key = beside == taken.slot ? 0 : slots[beside].key;
            const Child sibling = child_of(taken.slot, above_score, above.depth, above.token, child.rank + 1);
            const Child below = child_of(count, child_score, above.depth + 1, child.token, 0);
            const Best left = best_of({beside_key, beside}, slots, nodes);
            __syncwarp();  // they have been read
            if (lane == 0) {
                nodes[count] = {child, above.depth + 1, child.token};
                score[count] = child_score;
                slots[taken.slot] = sibling;
                slots[count] = below;
            }
            __syncwarp();
            if (lane == taken.slot / 32) {
                best = left;
                offer(sibling);
            }
            if (lane == count / 32)
                offer(below);
            count += 1;
        }
        if (costs)
            count_nodes();
        if (lane == 0)
            *num_nodes = kept = costs ? cut : count;
    }
    __syncthreads();
    for (int i = threadIdx.x; i <= budget; i += blockDim.x) {
        const bool is_node = i < kept;
        const Node node = nodes[i];
        tokens[i] = !is_node ? -1 : i == 0 ? *root : token_ids[size_t(node.depth - 1) * width + node.token];
        parents[i] = is_node ? node.parent : -1;
        depths[i] = is_node ? node.depth : -1;
        scores[i] = is_node ? score[i] : -INFINITY;
    }
}
