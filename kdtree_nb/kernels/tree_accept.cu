// tree_accept: walk from the root while a child carries the token that the target chose at its parent.
//
// Idea      one warp; at each node the lanes look through all nodes for that child.
// Grid      1 block of 32 threads.
// Padding   has the token −1 and the parent −1, so that no walk enters it.
#include "reduce.cuh"
#include "turn.cuh"

extern "C" __global__ void tree_accept(const int* tokens,                // [nodes]
                                       const int* parents,               // [nodes]
                                       const int* targets,               // [nodes] the target's token after each node
                                       int* __restrict__ path,           // [max_path] accepted nodes, root first; then −1
                                       int* __restrict__ committed,      // [max_path] accepted drafts, bonus; then −1
                                       int* __restrict__ length,         // [1] of both
                                       int nodes, int max_path)
{
    take_turn();
    int node = 0, count = 0;
    while (true) {
        const int target = targets[node];
        if (threadIdx.x == 0) {
            path[count] = node;
            committed[count] = target;
        }
        count += 1;
        int next = -1;
        for (int first = 0; first < nodes && next < 0 && count < max_path; first += 32) {
            const int i = first + threadIdx.x;
            const unsigned matches = __ballot_sync(ALL_LANES, i < nodes && parents[i] == node && tokens[i] == target);
            if (matches)
                next = first + __ffs(matches) - 1;
        }
        if (next < 0)
            break;
        node = next;
    }
    for (int i = count + threadIdx.x; i < max_path; i += 32)
        path[i] = committed[i] = -1;
    if (threadIdx.x == 0)
        *length = count;
}
