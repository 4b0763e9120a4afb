// What every source file shares: status checks on the host. Knows no operation.
#pragma once

#include <cuda_runtime.h>

#include "include/kdtree.h"

namespace kdtree {

inline int32_t from_cuda(cudaError_t error) {
    return error == cudaSuccess ? KDTREE_OK : KDTREE_CUDA_ERROR + static_cast<int32_t>(error);
}

// The status of the launch just made. Clears it, so that a failed launch is reported once and by the call that made it.
inline int32_t launch_status() { return from_cuda(cudaGetLastError()); }

inline bool aligned(const void *pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

template <typename T>
constexpr __host__ __device__ T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// Attributes of the current device, read once per device.
struct Device {
    int multiprocessors, shared_bytes /* a block may opt in to */, major, minor;
};
int32_t current_device(Device *out);

}  // namespace kdtree

#define KDTREE_TRY(expression)                                                    \
    do {                                                                          \
        if (int32_t kdtree_status_ = (expression); kdtree_status_ != KDTREE_OK) { \
            return kdtree_status_;                                                \
        }                                                                         \
    } while (0)
