// close_round: what a round leaves: the next root, how many tokens may still come, and what the host is told.
//
// Grid      1 block, any number of threads.
// Invariant copies.
#include "turn.cuh"

extern "C" __global__ void close_round(const int* path,         // [max_path] accepted nodes, then −1
                                       const int* committed,    // [max_path] tokens, then −1
                                       const int* length,       // [1] of both
                                       const int* num_nodes,    // [1] of the tree, or null: nodes
                                       const int* paying,       // [1] the first of them, or null: first
                                       int* __restrict__ root,    // [1]
                                       int* left,                 // [1], less the committed
                                       int* __restrict__ report,  // [3 + 2 · max_path]: nodes, paying, length, then
                                                                  // committed and path
                                       int nodes, int first, int max_path)
{
    take_turn();
    for (int i = threadIdx.x; i < max_path; i += blockDim.x) {
        report[3 + i] = committed[i];
        report[3 + max_path + i] = path[i];
    }
    if (threadIdx.x == 0) {
        const int count = *length;
        report[0] = num_nodes ? *num_nodes : nodes;
        report[1] = paying ? *paying : first;
        report[2] = count;
        *root = committed[count - 1];
        *left -= count;
    }
}
