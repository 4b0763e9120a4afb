// Puts the first `budget` of the nodes found into the order of the answer. Knows no candidates.
//
// A bucket sort by score. Inside a bucket a node counts the keys below its own; equal keys, and only those, take a full
// comparison. Logits of few bits make many equal scores, so a key holds what decides most of those too.
#pragma once

#include "tree_build_large.cuh"

namespace kdtree {

// Score descending, depth ascending, the parent's score descending (its last bits do not fit).
__device__ __forceinline__ uint64_t order_key(const Found *found, Found node) {
    static_assert(kMaxLevels <= 64);
    const uint32_t second = (node.depth() - 1) << 26 | score_key(found[node.parent()].score) >> 5;
    return static_cast<uint64_t>(score_key(node.score)) << 32 | second;
}

// Of nodes with equal keys: parent ascending, rank ascending. Parents, of equal depth, compare by score and then like these.
__device__ __forceinline__ bool comes_before(const Found *found, Found a, Found b) {
    while (a.parent() != b.parent()) {
        a = found[a.parent()];
        b = found[b.parent()];
        if (a.score != b.score) return a.score > b.score;
    }
    return a.rank() < b.rank();
}

// The greatest cost of all nodes, for where no cut-off says it.
template <int kThreads>
__device__ __forceinline__ float greatest_cost(Work<kThreads> &work, int count) {
    float cost = 0;
    for (int node = threadIdx.x; node < count; node += kThreads) cost = fmaxf(cost, -work.found[node].score);
    const unsigned bits = __reduce_max_sync(kFullWarp, __float_as_uint(cost));  // of floats ≥ 0, in their order
    if (lane_id() == 0) work.totals[warp_id()] = static_cast<int>(bits);
    __syncthreads();
    const int theirs = lane_id() < kThreads / 32 ? work.totals[lane_id()] : 0;
    __syncthreads();
    return __uint_as_float(__reduce_max_sync(kFullWarp, static_cast<unsigned>(theirs)));
}

// Fills work.answer from `count` nodes found, of which none costs more than `reach`; returns the number of nodes in the
// answer besides the root. work.table must be zero.
template <int kThreads>
__device__ __forceinline__ int order_nodes(Work<kThreads> &work, int count, int budget, float reach) {
    constexpr int kPerThread = Work<kThreads>::kCapacity / kThreads;
    const Buckets<kThreads> buckets(reach);
    Found mine[kPerThread];
    int bucket[kPerThread], place[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int node = 1 + i * kThreads + threadIdx.x;
        if (node >= count) continue;
        mine[i] = work.found[node];
        bucket[i] = buckets.of(mine[i].score);
        place[i] = atomicAdd(&work.table[bucket[i]], 1);
    }
    __syncthreads();
    scan_table(work);

#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int node = 1 + i * kThreads + threadIdx.x;
        if (node >= count) continue;
        const int start = bucket[i] ? work.table[bucket[i] - 1] : 0;
        work.order[start + place[i]] = static_cast<uint16_t>(node);
        work.key[start + place[i]] = order_key(work.found, mine[i]);
    }
    __syncthreads();

    const int kept = min(budget, count - 1);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int node = 1 + i * kThreads + threadIdx.x;
        if (node >= count) continue;
        const int start = bucket[i] ? work.table[bucket[i] - 1] : 0, end = work.table[bucket[i]];
        int index = start + 1, equal = 0;
        if (start < kept) {
            const uint64_t key = order_key(work.found, mine[i]);
#pragma unroll 4
            for (int other = start; other < end; ++other) {
                index += work.key[other] < key;
                equal += work.key[other] == key;
            }
            for (int other = start; equal > 1 && other < end; ++other) {
                if (work.key[other] != key) continue;
                index += comes_before(work.found, work.found[work.order[other]], mine[i]);
            }
        }
        place[i] = index <= kept ? index : 0;
        work.node[node] = static_cast<uint16_t>(place[i]);
    }
    if (threadIdx.x == 0) work.node[0] = 0;
    Answer<kThreads> &answer = work.answer;
    if (threadIdx.x <= kept) answer.first_child[threadIdx.x] = answer.next_sibling[threadIdx.x] = 0;
    __syncthreads();

#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int node = 1 + i * kThreads + threadIdx.x;
        if (node >= count || !place[i]) continue;
        const int parent = work.node[mine[i].parent()], rank = mine[i].rank();
        answer.parent[place[i]] = static_cast<uint16_t>(parent);
        answer.rank[place[i]] = static_cast<uint16_t>(rank);
        answer.depth[place[i]] = static_cast<uint8_t>(mine[i].depth());
        answer.score[place[i]] = mine[i].score;
        // Siblings were found one after the other.
        (rank == 0 ? answer.first_child[parent] : answer.next_sibling[work.node[node - 1]]) = static_cast<uint16_t>(place[i]);
    }
    if (threadIdx.x == 0) {
        answer.parent[0] = answer.rank[0] = answer.depth[0] = 0;
        answer.score[0] = 0;
    }
    __syncthreads();
    return kept;
}

}  // namespace kdtree
