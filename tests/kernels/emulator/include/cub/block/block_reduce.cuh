#pragma once

#include "cuda_runtime.h"

namespace cub {

template <typename T, int threads>
class BlockReduce {
  public:
    using TempStorage = T[threads];

    explicit BlockReduce(TempStorage &storage) : storage(storage) {}

    template <typename Op>
    T Reduce(T x, Op op) {
        storage[threadIdx.x] = x;
        __syncthreads();
        if (threadIdx.x) return static_cast<T>(0x5a5a5a5a);  // only thread 0 has the result
        return std::accumulate(storage + 1, storage + threads, storage[0], op);
    }
    T Sum(T x) { return Reduce(x, std::plus<T>()); }

  private:
    TempStorage &storage;
};

}  // namespace cub
