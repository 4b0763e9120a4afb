// Launching a kernel while the one before it on the stream still runs, which hides much of a launch. Knows no
// operation.
#pragma once

#include "common.cuh"

namespace kdtree {

// What a kernel that `enqueue_overlapped` launched does before it touches memory. Until here it may run beside the
// kernel before it, whose writes it sees from here on.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on, a next kernel launched so may take its place on the device; it waits there for the end of this one.
// Called after the wait, lest kernels further on hold places too.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename... Parameters, typename... Arguments>
int32_t enqueue_overlapped(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
                           const Arguments &...arguments) {
    cudaFuncAttributes attributes;
    KDTREE_TRY(from_cuda(cudaFuncGetAttributes(&attributes, kernel)));
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = attributes.ptxVersion >= 90 ? 1 : 0;  // older code does not wait
    return from_cuda(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace kdtree
