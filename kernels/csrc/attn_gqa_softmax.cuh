// The warp-level arithmetic of grouped-query attention: scores, a running softmax over them, its product with V. Knows shared
// memory and registers; not where K and V come from nor where the result goes.
//
// FlashAttention-2 (arXiv 2307.08691): the four warps form a grid of row groups by slot groups. Where registers allow, a warp
// has 32 rows, so that each fragment of K or V read from shared memory feeds twice the products it would with 16; shared
// memory, not the tensor cores, is what limits those. Two slot groups then share a step, and are joined when the item ends.
#pragma once

#include "attn.cuh"
#include "mma.cuh"

namespace kdtree {
namespace gqa {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpSlots = 64;  // of a step
constexpr int kSlotTiles = kWarpSlots / 8;
constexpr int kMaxCtas = 2;  // a multiprocessor, by registers
constexpr float kSlack = 8;  // powers of two by which scores may exceed the running maximum before it is raised
constexpr float kLog2e = 1.4426950408889634f;

template <int D>
struct Shape {
    static constexpr int kRowTiles = D <= 128 ? 2 : 1;  // m16 tiles of a warp
    static constexpr int kWarpRows = 16 * kRowTiles;
    static constexpr int kRowGroups = kTileRows / kWarpRows;
    static constexpr int kSlotGroups = kWarps / kRowGroups;
    static constexpr int kStepSlots = kWarpSlots * kSlotGroups;
    static constexpr int kCopySlots = kStepSlots / kWarps;              // that a warp copies
    static constexpr int kRowLanes = D <= 64 ? 8 : D <= 128 ? 16 : 32;  // that copy one row; where D = 96, some idly
    static constexpr int kRowBytes = 16 * kRowLanes;
    static constexpr int kMaskWords = kStepSlots / 32;  // of a row

    static constexpr int kHalfBytes = kStepSlots * kRowBytes;  // K or V of a step
    static constexpr int kQueryBytes = kTileRows * kRowBytes;
    static constexpr int kMaskBytes = kTileRows * kMaskWords * 4;
    static constexpr int kSharedBytes = 2 * kHalfBytes + kQueryBytes + kMaskBytes;
};

template <int D>
using Scores = float[Shape<D>::kRowTiles][kSlotTiles][4];

// What a thread holds of its warp's rows: row g + 8 * half of each m16 tile, as in mma.cuh.
template <int D>
struct Softmax {
    float out[Shape<D>::kRowTiles][D / 8][4];
    float max[Shape<D>::kRowTiles][2];
    float sum[Shape<D>::kRowTiles][2];  // over this thread's columns, until the end
};

// The scores, not yet scaled, of the warp's rows against its slots. `queries` and `keys`: this lane's first ldmatrix addresses.
template <typename T, int D>
__device__ __forceinline__ void score(Scores<D> &s, uint32_t queries, uint32_t keys) {
    using S = Shape<D>;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        uint32_t q[S::kRowTiles][4];
#pragma unroll
        for (int i = 0; i < S::kRowTiles; ++i) ldmatrix_x4(q[i], (queries ^ (k << 5)) + i * 16 * S::kRowBytes);
#pragma unroll
        for (int j = 0; j < kSlotTiles; j += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, (keys ^ (k << 5)) + j * 8 * S::kRowBytes);
#pragma unroll
            for (int i = 0; i < S::kRowTiles; ++i) {
                mma_m16n8k16<T>(s[i][j], q[i], b[0], b[1]);
                mma_m16n8k16<T>(s[i][j + 1], q[i], b[2], b[3]);
            }
        }
    }
}

// `masks`: of this thread's first row and its warp's slots. Scores are replaced, not added to: they may be NaN.
template <int D>
__device__ __forceinline__ void hide(Scores<D> &s, const uint32_t *masks) {
#pragma unroll
    for (int i = 0; i < Shape<D>::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t *row = masks + (16 * i + 8 * half) * Shape<D>::kMaskWords;
#pragma unroll
            for (int j = 0; j < kSlotTiles; ++j) {
                const uint32_t bits = row[j / 4] >> (j % 4 * 8 + threadIdx.x % 4 * 2);
                if (!(bits & 1)) s[i][j][2 * half] = -INFINITY;
                if (!(bits & 2)) s[i][j][2 * half + 1] = -INFINITY;
            }
        }
    }
}

// Raises the running maxima where the scores have left them behind. Each row decides by its own scores: its bits must not
// depend on what other rows see.
template <int D>
__device__ __forceinline__ void raise_maxima(Softmax<D> &state, const Scores<D> &s, float scale) {
    using S = Shape<D>;
    bool raise = false;
    float highest[S::kRowTiles][2];
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = -INFINITY;
#pragma unroll
            for (int j = 0; j < kSlotTiles; ++j) most = fmaxf(most, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            highest[i][half] = (most - state.max[i][half]) * scale > kSlack ? most : state.max[i][half];
            raise |= highest[i][half] != state.max[i][half];
        }
    }
    if (!__any_sync(~0u, raise)) return;
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float top = highest[i][half];
            const float factor = top == state.max[i][half] ? 1 : exp2_approx((state.max[i][half] - top) * scale);
            state.max[i][half] = top;
            state.sum[i][half] *= factor;
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                state.out[i][n][2 * half] *= factor;
                state.out[i][n][2 * half + 1] *= factor;
            }
        }
    }
}

// Adds one step to the warp's softmax. `values`: this lane's first ldmatrix address.
template <typename T, int D>
__device__ __forceinline__ void absorb(Softmax<D> &state, const Scores<D> &s, uint32_t values, float scale) {
    using S = Shape<D>;
    raise_maxima<D>(state, s, scale);
    uint32_t p[S::kRowTiles][kSlotTiles / 2][4];
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float top = state.max[i][half] == -INFINITY ? 0 : state.max[i][half] * scale;
#pragma unroll
            for (int j = 0; j < kSlotTiles; ++j) {
                const float low = exp2_approx(fmaf(s[i][j][2 * half], scale, -top));
                const float high = exp2_approx(fmaf(s[i][j][2 * half + 1], scale, -top));
                state.sum[i][half] += low + high;
                p[i][j / 2][j % 2 * 2 + half] = pack2<T>(low, high);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kSlotTiles / 2; ++k) {
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, (values ^ (n << 4)) + k * 16 * S::kRowBytes);
#pragma unroll
            for (int i = 0; i < S::kRowTiles; ++i) {
                mma_m16n8k16<T>(state.out[i][n], p[i][k], b[0], b[1]);
                mma_m16n8k16<T>(state.out[i][n + 1], p[i][k], b[2], b[3]);
            }
        }
    }
}

// Completes the sums; slot group 0 takes in what slot group 1 has.
template <int D>
__device__ __forceinline__ void join_slot_groups(Softmax<D> &state, float *shared, int row_group, int slot_group, float scale) {
    using S = Shape<D>;
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float &sum = state.sum[i][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        }
    }
    if constexpr (S::kSlotGroups == 2) {
        constexpr int kValues = S::kRowTiles * (D / 2 + 4);  // of a thread
        static_assert(S::kRowGroups * 32 * kValues * sizeof(float) <= 2 * S::kHalfBytes);
        float *place = shared + row_group * 32 * kValues + threadIdx.x % 32;
        __syncthreads();  // nobody reads K or V any more
        if (slot_group == 1) {
#pragma unroll
            for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    *place = state.max[i][half], place += 32;
                    *place = state.sum[i][half], place += 32;
#pragma unroll
                    for (int n = 0; n < D / 8; ++n) {
                        *place = state.out[i][n][2 * half], place += 32;
                        *place = state.out[i][n][2 * half + 1], place += 32;
                    }
                }
            }
        }
        __syncthreads();
        if (slot_group == 1) return;
#pragma unroll
        for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float other_max = *place, other_sum = place[32];
                place += 64;
                const float top = fmaxf(state.max[i][half], other_max), shift = top == -INFINITY ? 0 : top;
                const float a = exp2_approx((state.max[i][half] - shift) * scale), b = exp2_approx((other_max - shift) * scale);
                state.max[i][half] = top;
                state.sum[i][half] = a * state.sum[i][half] + b * other_sum;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        state.out[i][n][e] = a * state.out[i][n][e] + b * *place, place += 32;
                    }
                }
            }
        }
    }
}

}  // namespace gqa
}  // namespace kdtree
