// What belongs to the library as a whole: its version, its status texts, the device it runs on.
#include <mutex>

#include "common.cuh"

namespace kdtree {
namespace {

int32_t read_attributes(int index, Device *out) {
    KDTREE_TRY(from_cuda(cudaDeviceGetAttribute(&out->multiprocessors, cudaDevAttrMultiProcessorCount, index)));
    KDTREE_TRY(from_cuda(cudaDeviceGetAttribute(&out->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index)));
    KDTREE_TRY(from_cuda(cudaDeviceGetAttribute(&out->major, cudaDevAttrComputeCapabilityMajor, index)));
    return from_cuda(cudaDeviceGetAttribute(&out->minor, cudaDevAttrComputeCapabilityMinor, index));
}

}  // namespace

int32_t current_device(Device *out) {
    constexpr int kMost = 64;  // devices remembered; of others the attributes are read each time
    static std::once_flag once[kMost];
    static Device known[kMost];
    static int32_t status[kMost];
    int index = 0;
    KDTREE_TRY(from_cuda(cudaGetDevice(&index)));
    if (index >= kMost) return read_attributes(index, out);
    std::call_once(once[index], [&] { status[index] = read_attributes(index, &known[index]); });
    *out = known[index];
    return status[index];
}

}  // namespace kdtree

extern "C" {

int32_t kdtree_abi_version(void) { return KDTREE_ABI_VERSION; }

int32_t kdtree_max_qlen(void) { return 1024; }

const char *kdtree_status_string(int32_t status) {
    switch (status) {
        case KDTREE_OK: return "ok";
        case KDTREE_BAD_ARGUMENT: return "bad argument";
        case KDTREE_UNSUPPORTED_SHAPE: return "unsupported shape";
        case KDTREE_UNSUPPORTED_ARCHITECTURE: return "unsupported architecture";
        case KDTREE_WORKSPACE_TOO_SMALL: return "workspace too small";
        case KDTREE_MISALIGNED: return "misaligned pointer or stride";
        default:
            return status > KDTREE_CUDA_ERROR ? cudaGetErrorString(static_cast<cudaError_t>(status - KDTREE_CUDA_ERROR))
                                              : "unknown status";
    }
}

}  // extern "C"
