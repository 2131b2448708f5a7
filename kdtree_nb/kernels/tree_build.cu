// tree_build: the B most probable prefixes under the drafter's marginals or conditionals, best first, in one warp.
//
// Idea      The frontier holds, for every node, its first child and the next sibling of what was taken: at most one
//           candidate more than there are nodes. Each step the warp takes the best of it, writes it as a node, puts
//           its next sibling into the candidate's place and its first child at the end.
// Children  With marginals a depth has one row of log-probabilities. With conditionals it has one for each of the K
//           tokens that the parent may be, and children says which of the depth's tokens a rank of that row is.
// Cut       With costs the tree ends where (1 + Σ exp(score)) / cost is highest, summed in fp64 in the tree's order.
// Grid      1 block of 32 threads.
// Order     higher score first; equal scores by the lexicographically smaller path of ranks, a prefix before its
//           extensions. A score is one addition a node in the order of the path: no other tree is right.
#include "reduce.cuh"

constexpr int MAX_NODES = 1025;  // the root included

// A prefix that may become a node: its score, the node above it, its rank among its siblings, its depth.
struct Candidate {
    float score;
    int parent, rank, depth;
};

// Whether the path of ranks of a comes before that of b; rank and parent are the nodes'. Neither path is the start of
// the other: what is above a candidate has been taken.
__device__ bool comes_before(Candidate a, Candidate b, const int* rank, const int* parent)
{
    while (a.depth > b.depth)
        a = {a.score, parent[a.parent], rank[a.parent], a.depth - 1};
    while (b.depth > a.depth)
        b = {b.score, parent[b.parent], rank[b.parent], b.depth - 1};
    while (a.parent != b.parent) {
        a = {a.score, parent[a.parent], rank[a.parent], a.depth - 1};
        b = {b.score, parent[b.parent], rank[b.parent], b.depth - 1};
    }
    return a.rank < b.rank;
}

__device__ bool better(const Candidate& a, const Candidate& b, const int* rank, const int* parent)
{
    return a.score > b.score || (a.score == b.score && comes_before(a, b, rank, parent));
}

extern "C" __global__ void tree_build(const int* __restrict__ root,         // [1] the last committed token
                                      const float* __restrict__ log_probs,  // [length, width], descending; or
                                                                            // [length, width, width] with children
                                      const int* __restrict__ token_ids,    // [length, width]
                                      const int* __restrict__ children,     // [length, width, width]; null: marginals
                                      const float* __restrict__ costs,      // [budget + 1] seconds; null: no cut
                                      int* __restrict__ tokens,             // [budget + 1], −1 in padding
                                      int* __restrict__ parents,            // [budget + 1], −1 for the root, in padding
                                      int* __restrict__ depths,             // [budget + 1], −1 in padding
                                      float* __restrict__ scores,           // [budget + 1], −inf in padding
                                      int* __restrict__ num_nodes,          // [1]
                                      int length, int width, int budget)
{
    __shared__ Candidate frontier[MAX_NODES];
    __shared__ float score[MAX_NODES];
    __shared__ int rank[MAX_NODES], parent[MAX_NODES];
    __shared__ int token[MAX_NODES];  // which of its depth's, with children; the root's children are in row 0
    const int lane = threadIdx.x;

    // Where the log-probabilities at a depth, from 0, begin, given the parent's token.
    const auto row_of = [&](int depth, const int& parent_token) {
        return children ? (size_t(depth) * width + parent_token) * width : size_t(depth) * width;
    };

    // Every lane follows nodes and waiting; lane 0 writes.
    int nodes = 1, waiting = 0;
    if (length > 0 && width > 0 && log_probs[0] > -INFINITY)  // false for NaN as well
        waiting = 1;
    if (lane == 0) {
        tokens[0] = *root;
        parents[0] = parent[0] = -1;
        depths[0] = rank[0] = token[0] = 0;
        score[0] = scores[0] = 0.0f;
        if (waiting)
            frontier[0] = {0.0f + log_probs[0], 0, 0, 1};  // −0 becomes 0, as in every sum
    }
    __syncwarp();

    while (waiting > 0 && nodes <= budget) {
        int best = -1;
        for (int i = lane; i < waiting; i += 32)
            if (best < 0 || better(frontier[i], frontier[best], rank, parent))
                best = i;
        for (int step = 16; step > 0; step /= 2) {
            const int other = __shfl_xor_sync(ALL_LANES, best, step);
            if (other >= 0 && (best < 0 || better(frontier[other], frontier[best], rank, parent)))
                best = other;
        }
        const Candidate taken = frontier[best];
        __syncwarp();

        const size_t row = row_of(taken.depth - 1, token[taken.parent]);
        const int chosen = children ? children[row + taken.rank] : taken.rank;
        Candidate sibling{-INFINITY, taken.parent, taken.rank + 1, taken.depth};
        if (sibling.rank < width)
            sibling.score = score[taken.parent] + log_probs[row + sibling.rank];
        Candidate child{-INFINITY, nodes, 0, taken.depth + 1};
        if (taken.depth < length)
            child.score = taken.score + log_probs[row_of(taken.depth, chosen)];
        if (lane == 0) {
            tokens[nodes] = token_ids[(taken.depth - 1) * width + chosen];
            parents[nodes] = parent[nodes] = taken.parent;
            depths[nodes] = taken.depth;
            rank[nodes] = taken.rank;
            token[nodes] = chosen;
            score[nodes] = scores[nodes] = taken.score;
        }
        const bool more_siblings = sibling.score > -INFINITY, more_depth = child.score > -INFINITY;
        if (lane == 0) {
            frontier[best] = more_siblings ? sibling : more_depth ? child : frontier[waiting - 1];
            if (more_siblings && more_depth)
                frontier[waiting] = child;
        }
        waiting += int(more_siblings) + int(more_depth) - 1;
        nodes += 1;
        __syncwarp();
    }
    if (costs) {  // every lane does the same
        double expected = 1.0, best = 1.0 / costs[0];
        int kept = 1;
        for (int i = 1; i < nodes; ++i) {
            expected += exp(double(score[i]));
            if (expected / costs[i] > best) {
                best = expected / costs[i];
                kept = i + 1;
            }
        }
        nodes = kept;
    }
    __syncwarp();
    for (int i = nodes + lane; i <= budget; i += 32) {
        tokens[i] = parents[i] = depths[i] = -1;
        scores[i] = -INFINITY;
    }
    if (lane == 0)
        *num_nodes = nodes;
}
