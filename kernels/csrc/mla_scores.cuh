// The score warps of the portable MLA kernel: S = Q K^T, unit after unit. Knows neither masks nor softmax.
#pragma once

#include "mla_portable.cuh"

namespace kdtree::mla {

template <typename T, class C>
class ScoreWarp {
  public:
    __device__ ScoreWarp(const Parameters &parameters, Shared<C> &memory)
        : p(parameters),
          shared(memory),
          lane(threadIdx.x % 32),
          row_warp(threadIdx.x / 32 / C::kColumnWarps),
          column_warp(threadIdx.x / 32 % C::kColumnWarps) {}

    __device__ void run() {
        const int warp = threadIdx.x / 32, items = p.header->items;
        int n = 0;  // units so far
        for (int index = blockIdx.x; index < items; index += gridDim.x) {
            const Item &item = p.items[index];
            load_queries(item);
            const int seq_len = item.kv_len - p.rows.q_len[item.sequence], end = end_unit<C>(item);
            for (int unit = first_unit<C>(item); unit < end; ++unit, ++n) {
                Place place{0, -1};
                if (warp < C::kSlots / 32) place = take_slot<C>(shared.cursors[warp], p, threadIdx.x);
                barrier_wait(shared.landed[n % kStages][column_warp], n / kStages % 2);
                multiply(n % kStages);
                if (n) barrier_wait(shared.taken, (n - 1) % 2);  // S is free, and so is what the values of unit n - 2 needed
                publish();
                const int slot = place.slot(p);
                if (warp < C::kSlots / 32) shared.slots[n % kStages][threadIdx.x] = slot;
                if (threadIdx.x == 0) {
                    const bool last = unit + 1 == end, more = index + static_cast<int>(gridDim.x) < items;
                    shared.unit = {index, unit * C::kSlots - seq_len, last, last && !more, slot >= 0};
                }
                barrier_arrive(shared.scored);
            }
        }
    }

  private:
    const Parameters &p;
    Shared<C> &shared;
    const int lane, row_warp, column_warp;
    uint32_t held[C::kHeld][C::kRowTiles][4];
    float s[C::kRowTiles][C::kWarpSlots / 8][4];

    __device__ void load_queries(const Item &item) {
        constexpr int kChunks = C::kQueryRowBytes / 16;
        const int64_t first = static_cast<int64_t>(p.rows.row_offsets[item.sequence]) * p.heads + item.row_begin;
        const T *q = static_cast<const T *>(p.tensors.q) + first * kHeadDim;
        named_sync(kScores, kScoreThreads);  // the queries of the item before are no longer needed
        for (int i = threadIdx.x; i < kTileRows * kChunks; i += kScoreThreads) {
            const int row = i / kChunks, chunk = i % kChunks;
            const bool used = row < item.row_count;
            cp_async_16(shared_address(shared.queries) + swizzled(row, chunk, C::kQueryRowBytes),
                        q + (used ? row * kHeadDim + C::kHeld * 16 + chunk * 8 : 0), used);
        }
        cp_async_commit();
#pragma unroll
        for (int i = 0; i < 2 * C::kRowTiles; ++i) {
            const int row = row_warp * C::kWarpRows + 8 * i + lane / 4;
            const bool used = row < item.row_count;
            const auto *words = reinterpret_cast<const uint32_t *>(q + (used ? row * kHeadDim : 0)) + lane % 4;
#pragma unroll
            for (int k = 0; k < C::kHeld; ++k) {
                held[k][i / 2][i % 2] = used ? words[8 * k] : 0;
                held[k][i / 2][i % 2 + 2] = used ? words[8 * k + 4] : 0;
            }
        }
        cp_async_wait<0>();
        named_sync(kScores, kScoreThreads);
    }

    __device__ void multiply(int stage) {
        constexpr int kPairs = C::kWarpSlots / 16;
        const int key_row = column_warp * C::kWarpSlots + lane % 8 + lane / 16 * 8;
        const int query_row = row_warp * C::kWarpRows + lane % 16;
        const uint32_t key_base = shared_address(shared.keys[stage]), query_base = shared_address(shared.queries);
        // A lane's chunk within 128 bytes goes through four values, by exclusive or; everything else is a constant offset.
        const uint32_t key = key_base + swizzled(key_row, lane / 8 % 2, kRowBytes);
        const uint32_t query = query_base + swizzled(query_row, lane / 16, C::kQueryRowBytes);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
            for (int j = 0; j < 2 * kPairs; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) s[m][j][e] = 0;
            }
        }
        uint32_t a[2][C::kRowTiles][4], b[2][kPairs][4];
        const auto load = [&](int k) {
#pragma unroll
            for (int j = 0; j < kPairs; ++j) ldmatrix_x4(b[k % 2][j], (key ^ k % 4 * 32) + k / 4 * 128 + j * 16 * kRowBytes);
#pragma unroll
            for (int m = 0; m < C::kRowTiles; ++m) {
                const int i = k - C::kHeld;
                if (i >= 0) ldmatrix_x4(a[k % 2][m], (query ^ i % 4 * 32) + i / 4 * 128 + m * 16 * C::kQueryRowBytes);
            }
        };
        load(0);
#pragma unroll
        for (int k = 0; k < kDepthSteps; ++k) {
            if (k + 1 < kDepthSteps) load(k + 1);
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
#pragma unroll
                for (int m = 0; m < C::kRowTiles; ++m) {
                    const auto &x = k < C::kHeld ? held[k < C::kHeld ? k : 0][m] : a[k % 2][m];
                    mma_m16n8k16<T>(s[m][2 * j], x, b[k % 2][j][0], b[k % 2][j][1]);
                    mma_m16n8k16<T>(s[m][2 * j + 1], x, b[k % 2][j][2], b[k % 2][j][3]);
                }
            }
        }
    }

    __device__ void publish() {
#pragma unroll
        for (int i = 0; i < 2 * C::kRowTiles; ++i) {
#pragma unroll
            for (int k = 0; k < C::kWarpSlots / 16; ++k) {
                const auto &left = s[i / 2][2 * k], &right = s[i / 2][2 * k + 1];
                shared.scores[row_warp * 2 * C::kRowTiles + i][column_warp * (C::kWarpSlots / 16) + k][lane] =
                    make_float4(left[i % 2 * 2], left[i % 2 * 2 + 1], right[i % 2 * 2], right[i % 2 * 2 + 1]);
            }
        }
    }
};

}  // namespace kdtree::mla
