// Last stage of a small tree: every field from the nodes popped, padding included. Knows not how they were found.
#pragma once

#include "tree_build_best_first.cuh"

namespace kdtree {

struct alignas(16) Path {
    uint32_t mask[2];  // a node and some of its ancestors
    uint32_t next;     // the one after these
};

struct alignas(16) SmallWork {
    Popped popped[kSmallNodes];
    Path path[kSmallNodes];
    uint8_t child[kSmallNodes][kSmallNodes];  // node, by parent and rank; 0: none
    int count[kMaxLevels];                    // candidates of each row
    int made;                                 // nodes besides the root
};

// The number of nodes besides the root: `budget`, or all that exist.
__device__ __forceinline__ int count_nodes(const BuildSizes &sizes, const SmallWork &work, int budget) {
    int nodes = 0, of_level = 1;
    for (int level = 0; level < sizes.levels && nodes < budget; ++level) {
        of_level = min(of_level * work.count[level], budget);
        nodes += of_level;
    }
    return min(nodes, budget);
}

template <int kThreads>
__device__ __forceinline__ void clear_links(SmallWork &work) {
    uint4 *const units = reinterpret_cast<uint4 *>(work.child);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(work.child) / sizeof(uint4)); i += kThreads) units[i] = uint4{};
}

// All fields but the masks, by the first two warps.
__device__ __forceinline__ void write_small_fields(const kdtree_tree &out, const BuildSizes &sizes, const Candidates &rows,
                                                   SmallWork &work, int root, int seq_len) {
    const int node = threadIdx.x;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * sizes.size + node;
    const bool is_node = node <= work.made, is_child = is_node && node > 0, is_written = node < sizes.size;
    int token = root, parent = 0, depth = 0, rank = 0;
    if (is_child) {
        const uint32_t place = work.popped[node].place;
        const int candidate = (Place::candidate(place) - shared_address(rows.values)) / sizeof(float);
        parent = Place::node(place);
        depth = Place::depth(place) + 1;
        rank = candidate - (depth - 1) * sizes.stride;
        token = rows.tokens[candidate];
        work.child[parent][rank] = static_cast<uint8_t>(node);
    }
    if (is_written) {
        out.tokens[at] = is_node ? token : 0;
        out.parent[at] = is_child ? parent : -1;
        out.depth[at] = depth;
        out.position[at] = is_node ? seq_len + depth : 0;
        out.score[at] = is_child ? -work.popped[node].cost : 0.0f;
    }
    if (node == 0) out.n_nodes[blockIdx.x] = work.made + 1;
    named_sync(1, kSmallNodes);
    const int first_child = work.child[node][0], next_sibling = is_child ? work.child[parent][rank + 1] : 0;
    if (is_written) {
        out.first_child[at] = first_child ? first_child : -1;
        out.next_sibling[at] = next_sibling ? next_sibling : -1;
    }
}

// By one warp, two nodes a lane. Every step doubles the part of its path to the root that a node knows.
__device__ __forceinline__ void write_small_masks(const kdtree_tree &out, const BuildSizes &sizes, SmallWork &work) {
    constexpr int kPerLane = kSmallNodes / 32;
    Path mine[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int node = 32 * i + lane_id();
        mine[i] = {{0, 0},
                   static_cast<uint32_t>(node)};  // padding, which follows itself; so does the root, where all paths end
        if (node <= work.made) {
            mine[i].mask[i] = 1u << lane_id();
            mine[i].mask[0] |= 1;
            mine[i].next = node ? Place::node(work.popped[node].place) : 0;
        }
        work.path[node] = mine[i];
    }
    __syncwarp();
    for (int known = 1; known < sizes.levels; known *= 2) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const Path more = work.path[mine[i].next];
            mine[i] = {{mine[i].mask[0] | more.mask[0], mine[i].mask[1] | more.mask[1]}, more.next};
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) work.path[32 * i + lane_id()] = mine[i];
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int node = 32 * i + lane_id();
        if (node >= sizes.size) continue;
        uint32_t *const masks = out.ancestors + (static_cast<int64_t>(blockIdx.x) * sizes.size + node) * sizes.words;
#pragma unroll
        for (int word = 0; word < kPerLane; ++word) {
            if (word < sizes.words) masks[word] = mine[i].mask[word];
        }
    }
}

}  // namespace kdtree
