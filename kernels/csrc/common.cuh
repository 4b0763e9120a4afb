// What every source file shares: status checks on the host. Knows no operation.
#pragma once

#include <cuda_runtime.h>

#include "include/kdtree.h"

namespace kdtree {

inline int32_t from_cuda(cudaError_t error) {
    return error == cudaSuccess ? KDTREE_OK : KDTREE_CUDA_ERROR + static_cast<int32_t>(error);
}

#ifndef KDTREE_DYNAMIC_SHARED  // the shared memory that a launch asks for, as an array
#define KDTREE_DYNAMIC_SHARED(alignment, type, name) alignas(alignment) extern __shared__ type name[]
#endif

// The status of the launch just made. Clears it, so that a failed launch is reported once and by the call that made it.
inline int32_t launch_status() { return from_cuda(cudaGetLastError()); }

// What kernel<<<…>>>(…) does, in C++ that tests/kernels/emulator can compile.
template <typename... Parameters, typename... Arguments>
int32_t enqueue(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                const Arguments &...arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cudaLaunchKernelEx(&config, kernel, arguments...);
    return launch_status();
}

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
