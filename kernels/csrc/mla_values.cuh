// The value warps of the portable MLA kernel: mask, softmax, O = P V and its output; and all copies of keys.
#pragma once

#include "mla_portable.cuh"

namespace kdtree::mla {

// Bit j: whether row `node` sees own column first + j, j < 32. Negative columns are committed slots.
__device__ inline uint32_t visible(const kdtree_rows &rows, int sequence, int node, int first) {
    const auto lowest = [](int count) { return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1; };
    if (rows.causal[sequence]) return lowest(node - first + 1);
    const uint32_t *bits = rows.ancestors + static_cast<int64_t>(rows.row_offsets[sequence] + node) * rows.ancestor_words;
    const auto word = [&](int i) { return i >= 0 && i < rows.ancestor_words ? bits[i] : 0u; };
    const int index = first >> 5;  // rounds down, also below 0
    const uint32_t own = __funnelshift_r(word(index), word(index + 1), first & 31);
    return (own & lowest(rows.q_len[sequence] - first)) | lowest(-first);
}

template <typename T, class C>
class ValueWarp {
  public:
    __device__ ValueWarp(const Parameters &parameters, Shared<C> &memory)
        : p(parameters),
          shared(memory),
          lane(threadIdx.x % 32),
          warp((threadIdx.x - kScoreThreads) / 32),
          cache(static_cast<const char *>(p.tensors.k_cache) + 128 * warp + lane % 8 * 16) {}

    __device__ void run() {
        for (int stage = 0; stage < kStages; ++stage) {
            if (shared.slots[stage][0] < 0) break;  // not asked again: once copies have landed, score warps write to it
            for (int k = 0; k < C::kSteps; ++k) copy(stage, k);
        }
        for (int n = 0;; ++n) {
            clear();
            Unit unit;
            for (;; ++n) {
                barrier_wait(shared.scored, n % 2);
                unit = shared.unit;
                softmax(unit);
                named_sync(kValues, kValueThreads);
                rescale();
                multiply(n % kStages, unit.refill);
                if (C::kInPlace) barrier_arrive(shared.taken);
                if (unit.last) break;
            }
            store(p.items[unit.item]);
            if (unit.end) break;
        }
        cp_async_wait_all();
    }

  private:
    const Parameters &p;
    Shared<C> &shared;
    const int lane, warp;
    const char *const cache;  // this lane's columns of slot 0
    float o[kTileRows / 16][8][4];
    float reference, sum;  // of row(); sum: of this lane's columns

    // The row of which this lane makes P: four g and g + 8 of an m16 tile, so that a warp makes whole fragments.
    __device__ int row() const { return warp / 2 * 16 + warp % 2 * 4 + lane / 16 * 8 + lane % 16 / 4; }
    __device__ int fragment_lane() const { return warp % 2 * 16 + lane % 16; }

    // This warp's share of slots 16 k … 16 k + 15 of a stage: 64 columns, and with each 32 slots four rows of the rotary part.
    __device__ void copy(int stage, int k) {
        const uint32_t slot_bytes = p.slot_bytes;
        const auto source = [&](int slot) { return cache + static_cast<uint64_t>(static_cast<uint32_t>(slot)) * slot_bytes; };
        const uint32_t keys = shared_address(shared.keys[stage]);
        const int first = 16 * k + lane / 8 * 4;  // of four rows: their slots come out of shared memory together
        const uint32_t destination = keys + swizzled(first, 8 * warp + lane % 8, kRowBytes);
        const int4 slots = *reinterpret_cast<const int4 *>(&shared.slots[stage][first]);
        const int slot[4] = {slots.x, slots.y, slots.z, slots.w};
        const int rotary = 16 * (k - 1) + 4 * warp + lane / 8, rotary_slot = k % 2 ? shared.slots[stage][rotary] : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) cp_async_16((destination ^ 16 * i) + i * kRowBytes, source(slot[i]), true);
        if (k % 2) {
            cp_async_16(keys + swizzled(rotary, kValueDim / 8 + lane % 8, kRowBytes),
                        source(rotary_slot) + 2 * (kValueDim - 64 * warp), true);
            barrier_arrive_after_copies(shared.landed[stage][k / 2]);
        }
    }

    __device__ void clear() {
        reference = -INFINITY;
        sum = 0;
#pragma unroll
        for (int m = 0; m < kTileRows / 16; ++m) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) o[m][j][e] = 0;
            }
        }
    }

    __device__ void softmax(const Unit &unit) {
        constexpr int kColumns = 4 * C::kSteps;  // of a lane
        const int lower = lane / 16;
        float x[kColumns];
#pragma unroll
        for (int k = 0; k < C::kSteps; ++k) {
            const float4 s = shared.scores[warp / 2 * 2 + lower][k][fragment_lane()];
            x[4 * k] = s.x, x[4 * k + 1] = s.y, x[4 * k + 2] = s.z, x[4 * k + 3] = s.w;
        }
        if (!C::kInPlace) barrier_arrive(shared.taken);
        if (unit.first_column + C::kSlots > 0) mask(x, p.items[unit.item], unit.first_column);
        float tops[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            x[i] *= p.scale_log2;
            tops[i % 4] = fmaxf(tops[i % 4], x[i]);
        }
        float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const bool moves = top > reference + kGrowth, moved = __any_sync(~0u, moves);
        const float factor = moves ? exp2_approx(reference - top) : 1;  // 0 the first time
        if (moves) reference = top;
        const float zero = reference == -INFINITY ? 0 : reference;  // a row that has seen nothing: P = 0
#pragma unroll
        for (int i = 0; i < kColumns; ++i) x[i] = exp2_approx(x[i] - zero);
        named_sync(kValues, kValueThreads);  // the probabilities and factors of the unit before are no longer needed
        if (lane % 4 == 0) shared.rescale[row()] = factor;
        if (lane == 0) shared.moved[warp] = moved;
        // Row g has registers 0 and 2 of a fragment, row g + 8 has 1 and 3: the upper lanes' half of odd steps goes to the
        // lower lanes, the lower lanes' half of even steps to the upper ones.
        uint4 *out = shared.fragments(warp / 2) + fragment_lane();
#pragma unroll
        for (int k = 0; k < C::kSteps; k += 2) {
            uint32_t upper[2], under[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t even = pack2<T>(x[4 * k + 2 * i], x[4 * k + 2 * i + 1]);
                const uint32_t odd = pack2<T>(x[4 * k + 4 + 2 * i], x[4 * k + 5 + 2 * i]);
                const uint32_t other = __shfl_xor_sync(~0u, lower ? even : odd, 16);
                upper[i] = lower ? other : even;
                under[i] = lower ? odd : other;
            }
            out[32 * (k + lower)] = make_uint4(upper[0], under[0], upper[1], under[1]);
        }
        sum *= factor;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sum += x[i];
    }

    // By selection: the score of a slot that is not to be used may be anything.
    __device__ void mask(float (&x)[4 * C::kSteps], const Item &item, int first_column) {
        const int node = (item.row_begin + row()) / p.heads;
        const bool used = row() < item.row_count;
#pragma unroll
        for (int word = 0; word < C::kSlots / 32; ++word) {
            const uint32_t bits = used ? visible(p.rows, item.sequence, node, first_column + 32 * word) >> lane % 4 * 2 : 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float &s = x[8 * word + i];
                s = bits >> (i / 2 * 8 + i % 2) & 1 ? s : -INFINITY;
            }
        }
    }

    __device__ void rescale() {
        const uint2 moved = *reinterpret_cast<const uint2 *>(shared.moved);
        if (!(moved.x | moved.y)) return;
#pragma unroll
        for (int m = 0; m < kTileRows / 16; ++m) {
            const float upper = shared.rescale[16 * m + lane / 4], lower = shared.rescale[16 * m + 8 + lane / 4];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                o[m][j][0] *= upper;
                o[m][j][1] *= upper;
                o[m][j][2] *= lower;
                o[m][j][3] *= lower;
            }
        }
    }

    // O += P V, and refills each 16 slots as soon as it has read them. The loop stays rolled: unrolled, its loads move so far
    // ahead that registers run out.
    __device__ void multiply(int stage, bool refill) {
        constexpr int kTiles = kTileRows / 16;
        uint32_t value = shared_address(shared.keys[stage]) + swizzled(lane % 16, 8 * warp + lane / 16, kRowBytes);
#pragma unroll 1
        for (int k = 0; k < C::kSteps; ++k, value += 16 * kRowBytes) {
            const auto probabilities = [&](int m) { return shared.fragments(m)[32 * k + lane]; };
            uint32_t b[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) ldmatrix_x4_trans(b[i], value ^ 32 * i);
            uint4 next = probabilities(0);
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                const uint32_t a[4] = {next.x, next.y, next.z, next.w};
                if (m + 1 < kTiles) {
                    next = probabilities(m + 1);
                } else if (refill) {
                    __syncwarp();  // the warp has read its columns of these slots
                    copy(stage, k);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    mma_m16n8k16<T>(o[m][2 * i], a, b[i][0], b[i][1]);
                    mma_m16n8k16<T>(o[m][2 * i + 1], a, b[i][2], b[i][3]);
                }
            }
        }
    }

    __device__ void store(const Item &item) {
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const bool whole = item.partial < 0;
        const int64_t first_row = whole ? static_cast<int64_t>(p.rows.row_offsets[item.sequence]) * p.heads + item.row_begin
                                        : static_cast<int64_t>(item.partial) * kTileRows;
        if (lane % 4 == 0) {
            shared.inverse[row()] = sum > 0 ? __fdividef(1, sum) : 0;
            float *lse = whole ? p.tensors.lse : p.partial_lse;
            if (row() < item.row_count) lse[first_row + row()] = sum > 0 ? (reference + __log2f(sum)) * kLn2 : -INFINITY;
        }
        named_sync(kValues, kValueThreads);
        const int64_t first = first_row * kValueDim + 64 * warp + lane % 4 * 2;
        T *out = static_cast<T *>(p.tensors.out) + first;
        float *partial = p.partial_out + first;
#pragma unroll
        for (int i = 0; i < kTileRows / 8; ++i) {
            const int row = 8 * i + lane / 4;
            if (row >= item.row_count) continue;
            const float inverse = shared.inverse[row];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float x = o[i / 2][j][i % 2 * 2] * inverse, y = o[i / 2][j][i % 2 * 2 + 1] * inverse;
                if (whole) {
                    *reinterpret_cast<uint32_t *>(out + row * kValueDim + 8 * j) = pack2<T>(x, y);
                } else {
                    *reinterpret_cast<float2 *>(partial + row * kValueDim + 8 * j) = make_float2(x, y);
                }
            }
        }
    }
};

}  // namespace kdtree::mla
