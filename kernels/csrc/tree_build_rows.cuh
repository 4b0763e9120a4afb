// First stage of tree_build: each row's finite candidates, in order, at the front. Knows no tree.
#pragma once

#include "tree_build.cuh"

namespace kdtree {

// A warp per row. `kCapped`: values above 0, which break the promise of the interface, count as 0. `meanwhile` runs once, while
// the first loads are on their way; `packed(level, count)` once per row.
template <int kThreads, bool kCapped, typename Meanwhile, typename Packed>
__device__ __forceinline__ void pack_rows(const kdtree_build_input &in, const BuildSizes &sizes, const Candidates &rows,
                                          int budget, Meanwhile meanwhile, Packed packed) {
    constexpr int kChunks = 2;  // columns per lane and step
    bool first = true;
    for (int level = warp_id(); level < sizes.levels || first; level += kThreads / 32) {
        const bool is_row = level < sizes.levels;
        const int columns = is_row ? in.k : 0;
        const int64_t row = (static_cast<int64_t>(blockIdx.x) * in.levels + level) * in.k;
        float value[kChunks];
        int32_t token[kChunks];
        const auto load = [&](int begin) {
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                const int column = begin + 32 * i + lane_id();
                value[i] = column < columns ? in.logprobs[row + column] : -INFINITY;
                token[i] = column < columns ? in.ids[row + column] : 0;
            }
        };
        load(0);
        if (first) {
            meanwhile();
            float *const past = rows.values + sizes.levels * sizes.stride;
            for (int i = threadIdx.x; i < kSentinels * sizes.stride; i += kThreads) past[i] = NAN;
        }
        first = false;
        if (!is_row) break;
        float *const values = rows.values + level * sizes.stride;
        int32_t *const tokens = rows.tokens + level * sizes.stride;
        for (int rank = lane_id(); rank < sizes.stride; rank += 32) values[rank] = NAN;
        __syncwarp();

        // A node of depth d and rank r comes after d - 1 ancestors and r siblings: it needs budget ≥ r + d.
        const int most = min(sizes.width, max(budget - level, 0));
        int count = 0;
        for (int begin = 0; begin < columns && count < most; begin += 32 * kChunks) {
            if (begin) load(begin);
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                const bool finite = fabsf(value[i]) <= FLT_MAX;
                const unsigned mask = __ballot_sync(kFullWarp, finite);
                const int rank = count + __popc(mask & ((1u << lane_id()) - 1));
                if (finite && rank < most) {
                    values[rank] = kCapped ? fminf(value[i], 0) : value[i];
                    tokens[rank] = token[i];
                }
                count += __popc(mask);
            }
        }
        __syncwarp();
        packed(level, min(count, most));
    }
}

}  // namespace kdtree
