// The instructions the portable attention kernels are made of (sm_80 and newer): 8x8 matrix loads, m16n8k16 products of
// bf16 or fp16 with float accumulators, asynchronous copies, barriers. Knows no attention.
//
// Fragments, lane = 4 * g + t. A (16 x 16): registers 0 … 3 hold columns {2t, 2t+1} of rows g, g+8 and columns {2t+8, 2t+9}
// of rows g, g+8. B (16 x 8, k by n): rows {2t, 2t+1} and {2t+8, 2t+9} of column g. C and D (16 x 8): columns {2t, 2t+1} of
// row g, then of row g+8. So the accumulators of two neighbouring n8 tiles, packed, are the A fragment of the next product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace kdtree {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile whose rows are a multiple of 128 bytes: chunks trade places
// within each 128 bytes by row, so that eight rows of one column of chunks touch all 32 banks.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk, int row_bytes) {
    return static_cast<uint32_t>(row * row_bytes + ((chunk ^ (row & 7)) << 4));
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// d += a b
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two values rounded to T, `low` in the lower half: one register of an A fragment or of a row in memory.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t &>(pair);
}

template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t &>(pair);
}

// 16 bytes from global to shared memory, past L1; zeros, and `source` not read, where not `wanted`.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void *source, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(wanted ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `Pending` of this thread's committed groups are under way. Other threads' copies need a barrier as well.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A barrier in shared memory whose phases asynchronous copies can complete. Phase n has parity n % 2.
using Barrier = uint64_t;

__device__ __forceinline__ void barrier_init(Barrier &barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Arrives once this thread's copies so far have landed; does not wait for them.
__device__ __forceinline__ void barrier_arrive_after_copies(Barrier &barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ bool barrier_passed(Barrier &barrier, int parity) {
    uint32_t passed;
#if __CUDA_ARCH__ >= 900  // sleeps for a while first
#define KDTREE_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define KDTREE_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
    asm volatile("{ .reg .pred p; " KDTREE_WAIT " p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
#undef KDTREE_WAIT
    return passed;
}

__device__ __forceinline__ void barrier_wait(Barrier &barrier, int parity) {
    while (!barrier_passed(barrier, parity)) {}
}

// Hardware barriers 1 … 15 (0 is __syncthreads) among `threads` threads of the block, whole warps; arrive does not wait.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 2^x, denormal results flushed; exp2_approx(-inf) = 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace kdtree
