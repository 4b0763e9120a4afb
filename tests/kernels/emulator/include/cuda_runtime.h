// What kernels/csrc uses of the CUDA runtime, its language extensions and its built-in functions, for g++.
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <utility>

#include "scheduler.h"

#define __CUDACC__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static __attribute__((section("block_shared")))
#define KDTREE_DYNAMIC_SHARED(alignment, type, name) type *const name = reinterpret_cast<type *>(emulator::shared_memory)

template <typename T>
struct Vector2 {
    T x, y;
};
template <typename T>
struct alignas(16) Vector4 {
    T x, y, z, w;
};
using uint2 = Vector2<uint32_t>;
using float2 = Vector2<float>;
using int4 = Vector4<int32_t>;
using uint4 = Vector4<uint32_t>;
using float4 = Vector4<float>;
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct dim3 {
    uint32_t x, y, z;

    dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

// ---- the runtime ----

using cudaStream_t = struct CUstream_st *;
enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
enum {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor
};
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaLaunchAttributeProgrammaticStreamSerialization };

struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
struct cudaFuncAttributes {
    int ptxVersion;
};

inline cudaError_t launch_error;
inline cudaError_t cudaGetLastError() { return std::exchange(launch_error, cudaSuccess); }
inline const char *cudaGetErrorString(cudaError_t) { return emulator::last_error(); }
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int) {
    constexpr int kValues[] = {emulator::kMultiprocessors, emulator::kSharedBytes, 9, 0};  // an H200, but for its size
    return *value = kValues[attribute], cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
    return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, Kernel) {
    return attributes->ptxVersion = 90, cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...), const Arguments &...arguments) {
    const std::tuple<std::decay_t<Parameters>...> given(arguments...);
    const dim3 &grid = config->gridDim;
    const bool ok = emulator::launch({grid.x, grid.y, grid.z}, config->blockDim.x, config->dynamicSmemBytes,
                                     [&] { std::apply(kernel, given); });
    return launch_error = ok ? cudaSuccess : cudaErrorLaunchFailure;
}

// ---- built-in functions ----

using std::isnan;
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    return memcpy(&bits, &x, 4), bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    return memcpy(&x, &bits, 4), x;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __log2f(float x) { return std::log2(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int by) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
template <typename T>
T __ldcs(const T *pointer) {
    return *pointer;
}
template <typename T>
T atomicAdd(T *at, std::type_identity_t<T> x) {
    return std::exchange(*at, *at + x);
}

inline void __syncthreads() { emulator::barrier(0, blockDim.x); }
inline int __syncthreads_count(bool vote) { return emulator::barrier(0, blockDim.x, vote); }
inline int __syncthreads_or(bool vote) { return __syncthreads_count(vote) > 0; }
inline void __syncwarp() {
    emulator::together([](void **) {}, nullptr);
}

namespace emulator {

// Each lane's result is of(all lanes' values, lane, its own argument). The kernels use full warps alone.
template <typename Of, typename T>
auto exchange(Of of, T value, int argument = 0) {
    struct Lane {
        T value;
        int argument;
        decltype(of(&value, 0, 0)) result;
    } mine{value, argument, {}};
    together(
        [](void **lanes) {
            T values[32];
            for (int i = 0; i < 32; ++i) values[i] = static_cast<Lane *>(lanes[i])->value;
            for (int i = 0; i < 32; ++i) {
                auto &lane = *static_cast<Lane *>(lanes[i]);
                lane.result = Of()(values, i, lane.argument);
            }
        },
        &mine);
    return mine.result;
}

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
    return emulator::exchange([](const T *all, int, int from) { return all[from & 31]; }, x, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int bits) {
    return emulator::exchange([](const T *all, int lane, int bits) { return all[lane ^ bits]; }, x, bits);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int by) {
    return emulator::exchange([](const T *all, int lane, int by) { return all[lane < by ? lane : lane - by]; }, x, by);
}
template <typename T>
T __shfl_down_sync(unsigned, T x, int by) {
    return emulator::exchange([](const T *all, int lane, int by) { return all[lane + by < 32 ? lane + by : lane]; }, x, by);
}
inline uint32_t __ballot_sync(unsigned, bool vote) {
    const auto bits = [](const bool *all, int, int) {
        uint32_t bits = 0;
        for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(all[i]) << i;
        return bits;
    };
    return emulator::exchange(bits, vote);
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote); }
template <typename T>
T __reduce_add_sync(unsigned, T x) {
    return emulator::exchange([](const T *all, int, int) { return std::accumulate(all, all + 32, T{}); }, x);
}
template <typename T>
T __reduce_min_sync(unsigned, T x) {
    return emulator::exchange([](const T *all, int, int) { return *std::min_element(all, all + 32); }, x);
}
template <typename T>
T __reduce_max_sync(unsigned, T x) {
    return emulator::exchange([](const T *all, int, int) { return *std::max_element(all, all + 32); }, x);
}
