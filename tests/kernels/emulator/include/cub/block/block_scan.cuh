#pragma once

#include "cuda_runtime.h"

namespace cub {

template <typename T, int threads>
class BlockScan {
  public:
    using TempStorage = T[threads];

    explicit BlockScan(TempStorage &storage) : storage(storage) {}

    void ExclusiveSum(T x, T &before, T &all) {
        storage[threadIdx.x] = x;
        __syncthreads();
        before = std::accumulate(storage, storage + threadIdx.x, T{});
        all = std::accumulate(storage + threadIdx.x, storage + threads, before);
    }

  private:
    TempStorage &storage;
};

}  // namespace cub
