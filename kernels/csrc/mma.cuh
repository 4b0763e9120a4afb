// How the portable attention kernels lay out what mma.sync works on: in registers, and in shared memory. Knows no attention.
//
// Fragments, lane = 4 * g + t. A (16 x 16): registers 0 … 3 hold columns {2t, 2t+1} of rows g, g+8 and columns {2t+8, 2t+9}
// of rows g, g+8. B (16 x 8, k by n): rows {2t, 2t+1} and {2t+8, 2t+9} of column g. C and D (16 x 8): columns {2t, 2t+1} of
// row g, then of row g+8. So the accumulators of two neighbouring n8 tiles, packed, are the A fragment of the next product.
#pragma once

#include "ptx.cuh"

namespace kdtree {

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile whose rows are a multiple of 128 bytes: chunks trade places
// within each 128 bytes by row, so that eight rows of one column of chunks touch all 32 banks.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk, int row_bytes) {
    return static_cast<uint32_t>(row * row_bytes + ((chunk ^ (row & 7)) << 4));
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

__device__ __forceinline__ void barrier_wait(Barrier &barrier, int parity) {
    while (!barrier_passed(barrier, parity)) {}
}

}  // namespace kdtree
