// Grows a tree of any size best-first, one node at a time, by one warp. Knows nothing of cut-offs.
//
// The frontier has one entry per node: its next child. Lane l keeps the best entry of nodes 32 l … 32 l + 31. Exact whatever
// the ties; used where a cut-off would let too many nodes through.
#pragma once

#include "tree_build_large.cuh"

namespace kdtree {

// By one warp. Fills work.answer; returns the number of nodes besides the root.
template <int kThreads>
__device__ __forceinline__ int grow_frontier(const BuildSizes &sizes, const float *values, int budget, Work<kThreads> &work) {
    Answer<kThreads> &answer = work.answer;
    uint32_t *const key = work.table;        // of the node's next child
    uint16_t *const next_rank = work.order;  // that child's
    uint16_t *const last_child = work.node;  // the one before
    const int lane = lane_id();
    const auto start = [&](int node, float its_score, uint32_t its_key, int parent, int rank, int depth) {
        work.found[node].score = answer.score[node] = its_score;
        key[node] = its_key;
        next_rank[node] = last_child[node] = 0;
        answer.parent[node] = static_cast<uint16_t>(parent);
        answer.rank[node] = static_cast<uint16_t>(rank);
        answer.depth[node] = static_cast<uint8_t>(depth);
        answer.first_child[node] = answer.next_sibling[node] = 0;
    };
    for (int node = lane; node < kThreads; node += 32) key[node] = kNoKey;
    __syncwarp();
    if (lane == 0) start(0, 0, score_key(child_score(0, values[0])), 0, 0, 0);
    __syncwarp();

    uint32_t best = lane == 0 ? key[0] : kNoKey;
    uint32_t best_tag = 0;  // depth << 16 | node: what decides between equals
    int made = 0;
    while (made < budget) {
        const uint32_t top = __reduce_min_sync(kFullWarp, best);
        if (top > kLastKey) break;
        const uint32_t tag = __reduce_min_sync(kFullWarp, best == top ? best_tag : ~0u);
        const int parent = tag & 0xffff, depth = (tag >> 16) + 1, rank = next_rank[parent], last = last_child[parent];
        const int node = ++made;
        const float *row = values + (depth - 1) * sizes.stride;
        const uint32_t parent_key = score_key(child_score(work.found[parent].score, row[rank + 1]));
        const uint32_t node_key = score_key(child_score(key_score(top), row[sizes.stride]));

        const int other = parent / 32 * 32 + lane;  // of the parent's group
        const uint32_t other_key = other == parent ? parent_key : other == node ? node_key : key[other];
        const uint32_t other_depth = other == node ? depth : answer.depth[other];
        __syncwarp();
        if (lane == 0) {
            start(node, key_score(top), node_key, parent, rank, depth);
            (rank == 0 ? answer.first_child[parent] : answer.next_sibling[last]) = static_cast<uint16_t>(node);
            key[parent] = parent_key;
            next_rank[parent] = static_cast<uint16_t>(rank + 1);
            last_child[parent] = static_cast<uint16_t>(node);
        }
        __syncwarp();
        const uint32_t group_key = __reduce_min_sync(kFullWarp, other_key);
        const uint32_t group_tag = __reduce_min_sync(kFullWarp, other_key == group_key ? other_depth << 16 | other : ~0u);
        const uint32_t node_tag = depth << 16 | node;
        if (lane == parent / 32) {
            best = group_key;
            best_tag = group_tag;
        } else if (lane == node / 32 && (node_key < best || (node_key == best && node_tag < best_tag))) {
            best = node_key;
            best_tag = node_tag;
        }
    }
    return made;
}

}  // namespace kdtree
