// Finds every node whose score reaches a cut-off, level by level. Knows no order between nodes.
//
// Rows descend, so a node's children that reach the cut-off are its first ones; they get consecutive found indices. Where
// a level brings too many, the cut-off rises to what `budget` of the nodes known by then reach.
#pragma once

#include "tree_build_large.cuh"

namespace kdtree {

constexpr int kTeam = 8;  // threads per node

// The children of nodes [begin, end). Those that do not fit are dropped; work.made counts them all the same.
template <int kThreads>
__device__ __forceinline__ void expand_level(const BuildSizes &sizes, const float *row, Work<kThreads> &work, int level,
                                             int begin, int end, float cutoff) {
    const int team = lane_id() / kTeam, member = lane_id() % kTeam;
    const unsigned team_lanes = ((1u << kTeam) - 1) << team * kTeam;
    for (int first = begin + warp_id() * (32 / kTeam); first < end; first += kThreads / kTeam) {
        const int parent = first + team;
        const float score = parent < end ? work.found[parent].score : NAN;
        const auto child = [&](int rank) { return child_score(score, row[rank]); };

        static_assert(kTeam <= kLeastStride);
        unsigned reaches = __ballot_sync(kFullWarp, child(member) >= cutoff);
        int children = __popc(reaches & team_lanes);
        int offset = __popc(reaches & ((1u << team * kTeam) - 1)), total = __popc(reaches);  // of the warp's children
        if (__any_sync(kFullWarp, children == kTeam)) {
            for (int known = kTeam; __any_sync(kFullWarp, children == known); known += kTeam) {
                const int rank = known + member;
                reaches = __ballot_sync(kFullWarp, rank < sizes.stride && child(rank) >= cutoff);
                if (children == known) children += __popc(reaches & team_lanes);
            }
            offset = total = 0;
#pragma unroll
            for (int i = 0; i < 32 / kTeam; ++i) {
                const int theirs = __shfl_sync(kFullWarp, children, i * kTeam);
                if (i < team) offset += theirs;
                total += theirs;
            }
        }
        if (total == 0) continue;
        int base = 0;
        if (lane_id() == 0) base = atomicAdd(&work.made[level], total);
        base = end + __shfl_sync(kFullWarp, base, 0);
        if (base + total > Work<kThreads>::kCapacity) continue;
        for (int rank = member; rank < children; rank += kTeam) {
            work.found[base + offset + rank] = {child(rank), Found::link(parent, rank, level + 1)};
        }
    }
}

// A higher cut-off that at least `budget` of the nodes before `end` and the children of [begin, end) reach.
template <int kThreads>
__device__ __forceinline__ float raise_cutoff(const BuildSizes &sizes, const float *row, Work<kThreads> &work, int begin,
                                              int end, float cutoff, int budget, float reach) {
    const Buckets<kThreads> buckets(reach);
    work.table[threadIdx.x] = 0;
    __syncthreads();
    const auto add = [&](float score) {
        if (score >= cutoff) atomicAdd(&work.table[buckets.of(score)], 1);
    };
    for (int node = 1 + threadIdx.x; node < end; node += kThreads) add(work.found[node].score);
    for (int parent = begin + threadIdx.x / kTeam; parent < end; parent += kThreads / kTeam) {
        for (int rank = threadIdx.x % kTeam; rank < sizes.stride; rank += kTeam) {
            add(child_score(work.found[parent].score, row[rank]));
        }
    }
    __syncthreads();
    scan_table(work);
    const int before = threadIdx.x ? work.table[threadIdx.x - 1] : 0;
    if (before < budget && work.table[threadIdx.x] >= budget) {
        work.cutoff = -buckets.last_cost(threadIdx.x) * (1 + kSlack);
    }
    __syncthreads();
    return fmaxf(cutoff, work.cutoff);
}

// No node that reaches the cut-off costs more than `reach`. Returns the number of nodes, the root included; more than the
// capacity where too many are equal. work.made must be zero.
template <int kThreads>
__device__ __forceinline__ int expand(const BuildSizes &sizes, const float *values, Work<kThreads> &work, float cutoff,
                                      int budget, float reach) {
    constexpr int kCapacity = Work<kThreads>::kCapacity;
    const int rank = threadIdx.x;
    const float score = rank < sizes.width ? child_score(0, values[rank]) : NAN;
    const int children = __syncthreads_count(score >= cutoff);
    if (rank < children) work.found[1 + rank] = {score, Found::link(0, rank, 1)};
    if (rank == 0) work.found[0] = {0, 0};
    __syncthreads();
    int begin = 1, end = 1 + children;
    for (int level = 1; level < sizes.levels && begin < end; ++level) {
        const float *row = values + level * sizes.stride;
        expand_level(sizes, row, work, level, begin, end, cutoff);
        __syncthreads();
        if (end + work.made[level] > kCapacity) {
            cutoff = raise_cutoff(sizes, row, work, begin, end, cutoff, budget, reach);
            if (threadIdx.x == 0) work.made[level] = 0;
            __syncthreads();
            expand_level(sizes, row, work, level, begin, end, cutoff);
            __syncthreads();
        }
        begin = end;
        end += work.made[level];
        if (end > kCapacity) break;
    }
    return end;
}

}  // namespace kdtree
