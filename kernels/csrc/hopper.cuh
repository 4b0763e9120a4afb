// The instructions of sm_90a that the compiler has no names for: mbarrier, TMA, wgmma. Knows no operation.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kdtree::hopper {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: addresses are shared_address of a uint64_t ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t count = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns once the phase of that parity is complete.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// A barrier among `threads` threads of the CTA, a multiple of 32; ids 1 … 15.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary shared-memory writes before later accesses by wgmma and TMA.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- TMA ----

__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap &map, uint32_t barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void tma_prefetch(const CUtensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts the copy of 4 bytes to shared memory; copy_wait waits for all that this thread started.
__device__ __forceinline__ void copy_word(uint32_t destination, const void *source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- matrix fragments ----

__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t out;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    }
    return out;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// ---- wgmma ----

// A warpgroup takes registers from, or gives them to, the others of its CTA.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of an operand in 128-byte-swizzled pieces of 64 elements a row, rows 128 bytes apart, 1024-byte aligned.
// Rows along M or N (K-major): pieces side by side are not crossed. Rows along K: N crosses pieces, `piece_bytes` apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t piece_bytes = 16) {
    constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = 1024 >> 4;
    return kSwizzle128 | kEightRows << 32 | static_cast<uint64_t>(piece_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Without swizzle, rows along M or N: 8 rows of 16 bytes lie together, `step_bytes` apart along K, `rows_bytes` along M or N.
__device__ __forceinline__ uint64_t plain_descriptor(uint32_t address, uint32_t step_bytes, uint32_t rows_bytes) {
    return static_cast<uint64_t>(rows_bytes >> 4) << 32 | static_cast<uint64_t>(step_bytes >> 4) << 16 |
           (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of accumulators over a wait.
template <int kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define KDTREE_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KDTREE_16(d, i) KDTREE_4(d, i), KDTREE_4(d, i + 4), KDTREE_4(d, i + 8), KDTREE_4(d, i + 12)
#define KDTREE_32(d, i) KDTREE_16(d, i), KDTREE_16(d, i + 16)
#define KDTREE_TEXT_32                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KDTREE_TEXT_128                                                                            \
    KDTREE_TEXT_32                                                                                 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d [64, 64] (+)= a [64, 16] b [64, 16]ᵀ; a in registers, b rows along N. `add` 0 starts from zero.
#define KDTREE_WGMMA_64_REGISTERS(TYPE)                                                 \
    asm volatile(                                                                       \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                    \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" KDTREE_TEXT_32 \
        "}, "                                                                           \
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"                                     \
        : KDTREE_32(d, 0)                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
template <typename T>
__device__ __forceinline__ void wgmma_64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        KDTREE_WGMMA_64_REGISTERS("bf16");
    } else {
        KDTREE_WGMMA_64_REGISTERS("f16");
    }
}

// The same with a in shared memory, rows along M; always adds.
#define KDTREE_WGMMA_64_SHARED(TYPE)                                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" KDTREE_TEXT_32 \
                 "}, "                                                                           \
                 "%32, %33, 1, 1, 1, 0, 0;"                                                      \
                 : KDTREE_32(d, 0)                                                               \
                 : "l"(a), "l"(b))
template <typename T>
__device__ __forceinline__ void wgmma_64(float (&d)[32], uint64_t a, uint64_t b) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        KDTREE_WGMMA_64_SHARED("bf16");
    } else {
        KDTREE_WGMMA_64_SHARED("f16");
    }
}

// d [64, 256] (+)= a [64, 16] b [16, 256]; a rows along M, b rows along K.
#define KDTREE_WGMMA_256(TYPE)                                                            \
    asm volatile(                                                                         \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                     \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" KDTREE_TEXT_128 \
        "}, "                                                                             \
        "%128, %129, p, 1, 1, 0, 1;\n}"                                                   \
        : KDTREE_32(d, 0), KDTREE_32(d, 32), KDTREE_32(d, 64), KDTREE_32(d, 96)           \
        : "l"(a), "l"(b), "r"(add))
template <typename T>
__device__ __forceinline__ void wgmma_256(float (&d)[128], uint64_t a, uint64_t b, int add) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        KDTREE_WGMMA_256("bf16");
    } else {
        KDTREE_WGMMA_256("f16");
    }
}

#undef KDTREE_4
#undef KDTREE_16
#undef KDTREE_32
#undef KDTREE_TEXT_32
#undef KDTREE_TEXT_128
#undef KDTREE_WGMMA_64_REGISTERS
#undef KDTREE_WGMMA_64_SHARED
#undef KDTREE_WGMMA_256

}  // namespace kdtree::hopper
