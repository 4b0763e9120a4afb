// The bitonic sort of a block's keys in shared memory. Knows not what they stand for.
#pragma once

#include "common.cuh"

namespace kdtree {

// Sorts `size` keys in descending order, whose runs of `run` are sorted: the even ones descending, the odd ones ascending. Both
// are powers of two; a run of 1 is always sorted.
template <int kThreads>
__device__ __forceinline__ void merge_runs(uint64_t *keys, int run, int size) {
    for (run *= 2; run <= size; run *= 2) {
        for (int stride = run / 2; stride > 0; stride /= 2) {
            for (int pair = threadIdx.x; pair < size / 2; pair += kThreads) {
                const int i = 2 * pair - (pair & (stride - 1));
                const uint64_t a = keys[i], b = keys[i + stride];
                if ((a < b) == ((i & run) == 0)) {
                    keys[i] = b;
                    keys[i + stride] = a;
                }
            }
            __syncthreads();
        }
    }
}

}  // namespace kdtree
