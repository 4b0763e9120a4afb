// Finds a cost that at least `budget` nodes do not exceed, and not many more. Knows no node.
//
// The cost of a node is that of the best path of its depth plus, at each level, what its candidate costs above the level's
// best. Both are rounded up to whole bins, so counting paths by cost is one sum of shifted counts per level, and the cut-off
// found is never too low. Most nodes leave the best candidates rarely, so little is lost to rounding.
#pragma once

#include "tree_build_large.cuh"

namespace kdtree {

constexpr int kMostPaths = 1 << 20;  // counts stop there: 1023 of them still fit an int

// By the warp that packed the row.
__device__ __forceinline__ void quantise_row(const BuildSizes &sizes, const float *values, const Costs &costs, int level,
                                             float scale) {
    const float best = values[level * sizes.stride];
    for (int rank = lane_id(); rank < quantised_stride(sizes); rank += 32) {
        int cost = kBeyond;
        if (rank < sizes.width) {
            const float bins = ceilf((best - values[level * sizes.stride + rank]) * scale);
            if (bins < kBins) cost = max(static_cast<int>(bins), 0);
        }
        costs.quantised[level * quantised_stride(sizes) + rank] = static_cast<uint8_t>(cost);
    }
}

// What the count adds to. work.made is there because both start over together.
template <int kThreads>
__device__ __forceinline__ void clear_counts(const BuildSizes &sizes, const Costs &costs, Work<kThreads> &work) {
    uint4 *const paths = reinterpret_cast<uint4 *>(costs.paths);
    for (int i = threadIdx.x; i < (sizes.levels + 1) * 2 * kBins / 4; i += kThreads) paths[i] = uint4{};
    if (threadIdx.x < kMaxLevels) work.made[threadIdx.x] = 0;
    if (threadIdx.x < kBins) work.table[threadIdx.x] = 0;
}

// By one warp, once all rows are packed: which depths are within reach, and whether all nodes that exist fit. Places the root.
template <int kThreads>
__device__ __forceinline__ void measure_levels(const BuildSizes &sizes, const float *values, const Costs &costs,
                                               Work<kThreads> &work, float scale) {
    float path = 0, nodes = 1, existing = 1;
    int reach = 0;
    for (int begin = 0; begin < sizes.levels; begin += 32) {
        const int level = begin + lane_id();
        float cost = level < sizes.levels ? -values[level * sizes.stride] : NAN;
        float width = level < sizes.levels ? work.count[level] : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float cost_before = __shfl_up_sync(kFullWarp, cost, step);
            const float width_before = __shfl_up_sync(kFullWarp, width, step);
            if (lane_id() >= step) {
                cost += cost_before;
                width *= width_before;
            }
        }
        const float bins = ceilf((path + cost) * scale);
        const bool near = bins < kBins;
        if (near) work.shift[level] = max(static_cast<int>(bins), 0);
        const unsigned all_near = __ballot_sync(kFullWarp, near);
        if (reach == begin) reach += all_near == kFullWarp ? 32 : __ffs(~all_near) - 1;
        existing += __reduce_add_sync(kFullWarp, static_cast<unsigned>(fminf(nodes * width, kMostPaths)));
        path += __shfl_sync(kFullWarp, cost, 31);
        nodes *= __shfl_sync(kFullWarp, width, 31);
    }
    if (lane_id() == 0) {
        costs.paths[kBins] = 1;  // the root
        work.reach = reach;
        work.everything = existing <= Work<kThreads>::kCapacity;
    }
}

// Returns the cut-off in bins, kBins where it is out of reach, to every thread. costs.paths must be zero; work.table is
// scratch that must be zero in its first kBins entries.
template <int kThreads>
__device__ __forceinline__ int count_paths(const BuildSizes &sizes, const Costs &costs, Work<kThreads> &work, int budget) {
    constexpr int kGroups = kThreads / kBins;  // each takes every kGroups-th word of four candidates
    constexpr int kRow = 2 * kBins;
    const int bin = threadIdx.x % kBins, group = threadIdx.x / kBins;
    const int words = quantised_stride(sizes) / 4;
    const uint32_t *four = reinterpret_cast<const uint32_t *>(costs.quantised) + group;
    const bool has_word = group < words;
    const int reach = work.reach;
    constexpr uint32_t kNone = kBeyond * 0x01010101u;

    int *paths = costs.paths + kBins + bin;
    uint32_t next = has_word ? four[0] : kNone;
    for (int level = 0; level < reach; ++level, four += words, paths += kRow) {
        const auto reached_by = [&](uint32_t packed) {
            int sum = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += min(paths[-static_cast<int>(packed >> 8 * i & 0xff)], kMostPaths);
            return sum;
        };
        const uint32_t packed = next;
        if (has_word && level + 1 < reach) next = four[words];
        int sum = packed == kNone ? 0 : reached_by(packed);
        for (int word = kGroups; group + word < words; word += kGroups) {
            if (four[word] == kNone) break;
            sum += reached_by(four[word]);
        }
        if (sum) atomicAdd(paths + kRow, sum);
        __syncthreads();
    }

    int nodes = 0;
    for (int level = group; level < reach; level += kGroups) {
        nodes += min(costs.paths[(level + 1) * kRow + kBins + bin - work.shift[level]], kMostPaths);
    }
    if (nodes) atomicAdd(&work.table[bin], min(nodes, kMostPaths));
    __syncthreads();

    // Every warp finds the first bin at which the running count reaches the budget.
    static_assert(kBins == 64);
    const int even = work.table[2 * lane_id()], odd = work.table[2 * lane_id() + 1];
    int running = even + odd;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(kFullWarp, running, step);
        if (lane_id() >= step) running += before;
    }
    const unsigned reached = __ballot_sync(kFullWarp, running >= budget);
    const unsigned at_even = __ballot_sync(kFullWarp, running - odd >= budget);
    const int lane = __ffs(reached) - 1;
    return reached ? 2 * lane + !(at_even >> lane & 1) : kBins;
}

}  // namespace kdtree
