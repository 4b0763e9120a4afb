// How one attention step is cut into work, shared by every attention kernel. Knows no tensor core.
//
// The rows of a sequence that share a key head are numbered node * group + head-in-group and cut into tiles of 64; a tile's
// KV, [0, seq_len + q_len), is cut into blocks of 64 slots and those into chunks. An item is one chunk of one tile. A tile
// with one chunk is written straight to the output; the chunks of the others go to the workspace and attn_combine joins them.
// Items of one chunk are adjacent, so CTAs that run at the same time read the same KV, most of it from L2.
#pragma once

#include "common.cuh"

namespace kdtree {

constexpr int kTileRows = 64;
constexpr int kBlockSlots = 64;
constexpr int kMaxSequences = 1024;

struct Item {  // written by attn_plan; CTA c of n takes items c, c + n, …
    int sequence, kv_head;
    int row_begin, row_count;    // in the sequence's node * group + head numbering; row_count ≤ 64
    int block_begin, block_end;  // blocks of 64 slots from the sequence's start; never empty
    int partial;                 // index of its workspace tile; -1: it writes out and lse itself
    int kv_len;                  // seq_len + q_len: slots at and past it are not to be used
};

struct SequencePlan {
    int tiles;          // per key head
    int chunks;         // of every tile
    int chunk_blocks;   // blocks in each but the last
    int first_item;     // item = first_item + (chunk * kv_heads + kv_head) * tiles + tile
    int first_partial;  // likewise; used where chunks > 1
    int padding[3];
};

struct PlanHeader {
    int items;
    int combine;  // whether attn_combine has anything to do
    int padding[62];
};

struct Plan {  // a view of the caller's buffer
    PlanHeader *header;
    SequencePlan *sequences;
    Item *items;
};

struct PlanLimits {  // from host arguments alone
    int64_t tiles, items, partials;
    size_t plan_bytes, workspace_bytes;
};

struct AttnCall {
    kdtree_rows rows;
    kdtree_attn attn;
    kdtree_attn_tensors tensors;
    Plan plan;
    float *partial_out;  // [partials, 64, v_dim], each row divided by its own denominator
    float *partial_lse;  // [partials, 64], natural log; -inf where the row saw nothing in the chunk
    Device device;
    cudaStream_t stream;
};

inline __host__ __device__ int group_of(const kdtree_attn &attn) { return attn.heads / attn.kv_heads; }
inline bool is_mla(const kdtree_attn &attn) { return attn.head_dim != attn.v_dim; }

// CTAs a kernel keeps in flight; the plan balances for that many.
int attn_workers(const kdtree_attn &attn, const Device &device);
int gqa_workers_per_sm(const kdtree_attn &attn, const Device &device);
bool gqa_serves(int head_dim);
PlanLimits plan_limits(const kdtree_rows &rows, const kdtree_attn &attn, const Device &device);
Plan plan_view(const kdtree_rows &rows, void *plan);
int32_t launch_plan(const kdtree_rows &rows, const kdtree_attn &attn, const Device &device, void *plan, cudaStream_t stream);

// Each launches min(workers, limits.items) persistent CTAs.
int32_t launch_gqa(const AttnCall &call);
int32_t launch_mla_portable(const AttnCall &call);
int32_t launch_mla_hopper(const AttnCall &call);
int32_t launch_combine(const AttnCall &call);

#ifdef __CUDACC__
// Bit c of the row's mask: whether own row `column` is visible to own row `node` of the sequence.
__device__ __forceinline__ bool sees(const kdtree_rows &rows, int sequence, int first_row, int node, int column) {
    if (rows.causal[sequence]) return column <= node;
    const uint32_t *bits = rows.ancestors + static_cast<int64_t>(first_row + node) * rows.ancestor_words;
    return bits[column >> 5] >> (column & 31) & 1;
}
#endif

}  // namespace kdtree
