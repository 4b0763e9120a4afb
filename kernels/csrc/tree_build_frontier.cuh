// Grows a tree of any size best-first, one node at a time, by one warp. Knows nothing of cut-offs, nor on what a node's
// children depend.
//
// The frontier has one entry per node: its next child. Lane l keeps the best entry of nodes 32 l … 32 l + 31. Exact whatever
// the ties; used where a cut-off would let too many nodes through.
#pragma once

#include "tree_build_large.cuh"

namespace kdtree {

struct Child {
    float value;        // log-prob given the parent; NaN: there is none
    int32_t candidate;  // of its depth
};

// Where a node's children do not depend on it: one row of candidates a depth, and a candidate is its rank.
struct DepthRows {
    const float *values;
    int stride;

    // The child of this rank, of a parent that is this candidate of the depth before.
    __device__ Child at(int depth, int parent, int rank) const { return {values[(depth - 1) * stride + rank], rank}; }
};

// By one warp. Fills work.answer, whose rank is the node's candidate; returns the number of nodes besides the root.
template <typename Rows, int kThreads>
__device__ __forceinline__ int grow_frontier(const Rows &rows, int budget, Work<kThreads> &work) {
    Answer<kThreads> &answer = work.answer;
    uint32_t *const key = work.table;        // of the node's next child
    uint16_t *const next_rank = work.order;  // that child's
    uint16_t *const last_child = work.node;  // the one before
    const int lane = lane_id();
    const auto start = [&](int node, float its_score, uint32_t its_key, int its_next, int parent, int candidate, int depth) {
        work.found[node] = {its_score, static_cast<uint32_t>(its_next)};  // links: the candidate that its next child is
        answer.score[node] = its_score;
        key[node] = its_key;
        next_rank[node] = last_child[node] = 0;
        answer.parent[node] = static_cast<uint16_t>(parent);
        answer.rank[node] = static_cast<uint16_t>(candidate);
        answer.depth[node] = static_cast<uint8_t>(depth);
        answer.first_child[node] = answer.next_sibling[node] = 0;
    };
    for (int node = lane; node < kThreads; node += 32) key[node] = kNoKey;
    __syncwarp();
    const Child best_child = rows.at(1, 0, 0);
    if (lane == 0) start(0, 0, score_key(child_score(0, best_child.value)), best_child.candidate, 0, 0, 0);
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
        const Found above = work.found[parent];
        const int candidate = above.links;
        const Child sibling = rows.at(depth, answer.rank[parent], rank + 1), child = rows.at(depth + 1, candidate, 0);
        const uint32_t parent_key = score_key(child_score(above.score, sibling.value));
        const uint32_t node_key = score_key(child_score(key_score(top), child.value));

        const int other = parent / 32 * 32 + lane;  // of the parent's group
        const uint32_t other_key = other == parent ? parent_key : other == node ? node_key : key[other];
        const uint32_t other_depth = other == node ? depth : answer.depth[other];
        __syncwarp();
        if (lane == 0) {
            start(node, key_score(top), node_key, child.candidate, parent, candidate, depth);
            (rank == 0 ? answer.first_child[parent] : answer.next_sibling[last]) = static_cast<uint16_t>(node);
            key[parent] = parent_key;
            work.found[parent].links = sibling.candidate;
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
