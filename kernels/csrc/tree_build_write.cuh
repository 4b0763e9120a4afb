// Last stage of a large tree: every field of it, padding included. Knows the answer, not how it was found.
#pragma once

#include "tree_build.cuh"

namespace kdtree {

// Of the masks that are made at a time, in shared memory.
inline __host__ __device__ int mask_words(const BuildSizes &sizes) { return ceil_div(sizes.tile_rows * sizes.pitch, 4) * 4; }

// Sets the mask of one node by walking to the root. Ancestors come in descending order, so words do too.
__device__ __forceinline__ void set_mask(const uint16_t *parent, int node, uint32_t *mask) {
    int word = node / 32;
    uint32_t bits = 1u << node % 32;
    for (int ancestor = node; ancestor != 0;) {
        ancestor = parent[ancestor];
        if (ancestor / 32 != word) {
            mask[word] = bits;
            word = ancestor / 32;
            bits = 0;
        }
        bits |= 1u << ancestor % 32;
    }
    mask[word] = bits;
}

// Writes rows [begin, end) of the sequence's masks, in units of 4 or 16 bytes, and clears them where `clear`.
template <typename Unit, int kThreads>
__device__ __forceinline__ void copy_masks(const BuildSizes &sizes, uint32_t *masks, uint32_t *ancestors, int begin, int end,
                                           bool clear) {
    constexpr int kWords = sizeof(Unit) / sizeof(uint32_t);
    const int units = sizes.words / kWords, pitch = sizes.pitch / kWords;  // of a row
    const int rows_per_step = kThreads / units, units_per_step = kThreads % units;
    int row = threadIdx.x / units, unit = threadIdx.x % units;
    Unit *const from = reinterpret_cast<Unit *>(masks);
    Unit *const to = reinterpret_cast<Unit *>(ancestors + static_cast<int64_t>(begin) * sizes.words);
#pragma unroll 4
    for (int i = threadIdx.x; i < (end - begin) * units; i += kThreads) {
        to[i] = from[row * pitch + unit];
        if (clear) from[row * pitch + unit] = Unit{};
        row += rows_per_step;
        unit += units_per_step;
        if (unit >= units) {
            unit -= units;
            ++row;
        }
    }
}

template <int kThreads>
__device__ __forceinline__ void clear_masks(const BuildSizes &sizes, uint32_t *masks) {
    uint4 *const units = reinterpret_cast<uint4 *>(masks);
    for (int i = threadIdx.x; i < ceil_div(sizes.tile_rows * sizes.pitch, 4); i += kThreads) units[i] = uint4{};
}

// `masks` must be clear.
template <int kThreads, int kNodes>
__device__ __forceinline__ void write_masks(const BuildSizes &sizes, const Answer<kNodes> &answer, int nodes, uint32_t *masks,
                                            uint32_t *ancestors) {
    for (int begin = 0; begin < sizes.size; begin += sizes.tile_rows) {
        const int end = min(begin + sizes.tile_rows, sizes.size);
        // Other threads than those that have fields to write, where there are more threads than nodes.
        for (int node = begin + (threadIdx.x + kThreads / 2) % kThreads; node < min(end, nodes); node += kThreads) {
            set_mask(answer.parent, node, masks + (node - begin) * sizes.pitch);
        }
        __syncthreads();
        const bool more = end < sizes.size;
        if (sizes.vectors) {
            copy_masks<uint4, kThreads>(sizes, masks, ancestors, begin, end, more);
        } else {
            copy_masks<uint32_t, kThreads>(sizes, masks, ancestors, begin, end, more);
        }
        if (more) __syncthreads();
    }
}

// All fields but the masks.
template <int kThreads, int kNodes>
__device__ __forceinline__ void write_fields(const kdtree_tree &out, const BuildSizes &sizes, const Answer<kNodes> &answer,
                                             const int32_t *tokens, int nodes, int root, int seq_len) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * sizes.size;
    const auto link = [](int node) { return node ? node : -1; };
    for (int node = threadIdx.x; node < sizes.size; node += kThreads) {
        int32_t token = 0, parent = -1, depth = 0, position = 0, first_child = -1, next_sibling = -1;
        float score = 0;
        if (node < nodes) {
            depth = answer.depth[node];
            position = seq_len + depth;
            first_child = link(answer.first_child[node]);
            next_sibling = link(answer.next_sibling[node]);
            token = node ? tokens[(depth - 1) * sizes.stride + answer.rank[node]] : root;
            if (node) parent = answer.parent[node];
            score = answer.score[node];
        }
        out.tokens[at + node] = token;
        out.parent[at + node] = parent;
        out.depth[at + node] = depth;
        out.position[at + node] = position;
        out.first_child[at + node] = first_child;
        out.next_sibling[at + node] = next_sibling;
        out.score[at + node] = score;
    }
    if (threadIdx.x == 0) out.n_nodes[blockIdx.x] = nodes;
}

}  // namespace kdtree
