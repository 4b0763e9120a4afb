// Cuts one attention step into items (attn.cuh) that keep every multiprocessor busy for the same time. Reads lengths on the
// device, so that a captured graph replays with other lengths. Knows how long a block takes only in units of a block.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cuda/functional>

#include "attn.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 1024;         // one per sequence
constexpr int kCandidates = 64;        // chunk lengths compared
constexpr int kChunksPerWorker = 4;    // bounds the workspace: at most this many chunks a worker, besides one a tile
constexpr float kItemBlocks = 2;       // what starting and ending an item costs, in blocks
constexpr float kJoinBlocks = 2;       // what joining chunks costs once
constexpr float kChunkBlocks = 0.03f;  // and for each chunk of each tile, which is written and read in float

static_assert(kMaxSequences == kThreads);

struct Lengths {  // of one sequence
    int tiles, blocks;
};

struct Chunks {
    int count, blocks;
};

__device__ Chunks cut(int blocks, int most) {  // evenly, into as few chunks of at most `most` blocks as possible
    const int even = ceil_div(blocks, ceil_div(blocks, most));
    return {ceil_div(blocks, even), even};
}

// Chunks that the longest sequence has in candidate i: 1, 2, …, 32, 40, 48, …, 288.
__device__ int chunks_of_longest(int i) { return i < 32 ? i + 1 : 8 * i - 216; }

// The chunk length that should end first. Workers take items in turn, so the one with the longest also has average ones.
// Every thread gets the result.
__device__ int best_chunk(const Lengths *lengths, int sequences, int kv_heads, int64_t total, int longest, int workers) {
    constexpr int kLanes = kThreads / kCandidates;  // threads that sum over the sequences for one candidate
    __shared__ float costs[kCandidates];
    __shared__ int best;
    const int candidate = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int least = static_cast<int>(ceil_div<int64_t>(total, static_cast<int64_t>(kChunksPerWorker) * workers));
    const auto most = [&](int i) { return max(max(ceil_div(longest, chunks_of_longest(i)), least), 1); };
    int items = 0;
    for (int s = lane; s < sequences; s += kLanes) {
        if (lengths[s].tiles) items += lengths[s].tiles * kv_heads * cut(lengths[s].blocks, most(candidate)).count;
    }
    for (int step = kLanes / 2; step; step /= 2) items += __shfl_xor_sync(~0u, items, step);
    if (lane == 0) {
        const float average = static_cast<float>(total) / max(items, 1) + kItemBlocks;
        const float longest_item = static_cast<float>(cut(longest, most(candidate)).blocks) + kItemBlocks;
        const float join = most(candidate) < longest ? kJoinBlocks + kChunkBlocks * items : 0;
        costs[candidate] = fmaxf(average, longest_item) + (ceil_div(max(items, 1), workers) - 1) * average + join;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        static_assert(kCandidates == 64);
        int mine = costs[threadIdx.x] <= costs[threadIdx.x + 32] ? threadIdx.x : threadIdx.x + 32;
        for (int step = 16; step; step /= 2) {
            const int other = __shfl_xor_sync(~0u, mine, step);
            if (costs[other] < costs[mine] || (costs[other] == costs[mine] && other < mine)) mine = other;
        }
        if (threadIdx.x == 0) best = mine;
    }
    __syncthreads();
    return most(best);
}

__global__ void __launch_bounds__(kThreads) plan_kernel(kdtree_rows rows, kdtree_attn attn, Plan plan, int workers) {
    using Scan = cub::BlockScan<int, kThreads>;
    using Sum = cub::BlockReduce<int64_t, kThreads>;
    using Max = cub::BlockReduce<int, kThreads>;
    __shared__ typename Scan::TempStorage scan;
    __shared__ typename Sum::TempStorage sum;
    __shared__ typename Max::TempStorage max_of;
    __shared__ Lengths lengths[kThreads];
    __shared__ int first_item[kThreads];
    __shared__ int64_t total;
    __shared__ int longest;
    const int s = threadIdx.x, group = group_of(attn), kv_heads = attn.kv_heads;

    Lengths mine{0, 0};
    bool unused = false;  // whether some row of this sequence, or past the last, is not in use
    if (s < rows.sequences) {
        const int q_len = rows.q_len[s], end = rows.row_offsets[s + 1];
        unused = end - rows.row_offsets[s] > q_len || (s == rows.sequences - 1 && end < rows.total_rows);
        if (q_len > 0) mine = {ceil_div(q_len * group, kTileRows), ceil_div(rows.seq_len[s] + q_len, kBlockSlots)};
    }
    lengths[s] = mine;
    const int64_t all = Sum(sum).Sum(static_cast<int64_t>(mine.tiles) * kv_heads * mine.blocks);
    const int most_blocks = Max(max_of).Reduce(mine.blocks, cuda::maximum<>{});
    if (s == 0) {
        total = all;
        longest = max(most_blocks, 1);
    }
    __syncthreads();
    const int most =
        attn.split ? attn.split / kBlockSlots : best_chunk(lengths, rows.sequences, kv_heads, total, longest, workers);

    const Chunks chunks = mine.tiles ? cut(mine.blocks, most) : Chunks{0, 0};
    const int items = mine.tiles * kv_heads * chunks.count;
    int item, item_count, partial, partial_count;
    Scan(scan).ExclusiveSum(items, item, item_count);
    __syncthreads();
    Scan(scan).ExclusiveSum(chunks.count > 1 ? items : 0, partial, partial_count);
    first_item[s] = item;
    if (s < rows.sequences) plan.sequences[s] = {mine.tiles, chunks.count, chunks.blocks, item, partial, {}};
    const bool combine = __syncthreads_or(unused) || partial_count;  // also makes the writes above visible
    if (s == 0) {
        plan.header->items = item_count;
        plan.header->combine = combine;
    }

    for (int i = threadIdx.x; i < item_count; i += kThreads) {
        int low = 0, high = rows.sequences;  // the last sequence whose first item is ≤ i; one without items is never it,
        while (high - low > 1) {             // because the next one starts at the same item
            const int middle = (low + high) / 2;
            (first_item[middle] <= i ? low : high) = middle;
        }
        const SequencePlan p = plan.sequences[low];
        const int local = i - p.first_item, row_begin = local % p.tiles * kTileRows;
        const int q_len = rows.q_len[low], seq_len = rows.seq_len[low];
        const int row_count = min(q_len * group - row_begin, kTileRows), last_node = (row_begin + row_count - 1) / group;
        const int begin = local / (p.tiles * kv_heads) * p.chunk_blocks;
        // No row sees a later one, so the tile needs nothing past its last node; but an item has at least one block.
        const int end = min(begin + p.chunk_blocks, ceil_div(seq_len + last_node + 1, kBlockSlots));
        plan.items[i] = {low,
                         local / p.tiles % kv_heads,
                         row_begin,
                         row_count,
                         begin,
                         max(end, begin + 1),
                         p.chunks > 1 ? p.first_partial + local : -1,
                         seq_len + q_len};
    }
}

size_t padded(size_t bytes) { return ceil_div<size_t>(bytes, 256) * 256; }

}  // namespace

int attn_workers(const kdtree_attn &attn, const Device &device) {
    return device.multiprocessors * (is_mla(attn) ? 1 : gqa_workers_per_sm(attn, device));
}

PlanLimits plan_limits(const kdtree_rows &rows, const kdtree_attn &attn, const Device &device) {
    PlanLimits limits{};
    const int64_t total_rows = static_cast<int64_t>(rows.total_rows) * group_of(attn);
    limits.tiles = attn.kv_heads * (ceil_div<int64_t>(total_rows, kTileRows) + rows.sequences);
    const int64_t slots = static_cast<int64_t>(rows.pages) * rows.page_size;
    if (attn.split) {
        const int64_t chunks = ceil_div<int64_t>(ceil_div<int64_t>(slots, kBlockSlots), attn.split / kBlockSlots);
        limits.items = limits.tiles * chunks;
        limits.partials = chunks > 1 ? limits.items : 0;
    } else {
        const int64_t chunks = static_cast<int64_t>(kChunksPerWorker) * attn_workers(attn, device);
        limits.items = limits.tiles + chunks;
        limits.partials = 2 * chunks;  // a tile that is cut has more than one chunk length of blocks
    }
    limits.plan_bytes = sizeof(PlanHeader) + padded(rows.sequences * sizeof(SequencePlan)) + limits.items * sizeof(Item);
    limits.workspace_bytes =
        padded(limits.partials * kTileRows * attn.v_dim * sizeof(float)) + limits.partials * kTileRows * sizeof(float);
    return limits;
}

Plan plan_view(const kdtree_rows &rows, void *plan) {
    auto *bytes = static_cast<char *>(plan);
    auto *sequences = bytes + sizeof(PlanHeader);
    return {reinterpret_cast<PlanHeader *>(bytes), reinterpret_cast<SequencePlan *>(sequences),
            reinterpret_cast<Item *>(sequences + padded(rows.sequences * sizeof(SequencePlan)))};
}

int32_t launch_plan(const kdtree_rows &rows, const kdtree_attn &attn, const Device &device, void *plan, cudaStream_t stream) {
    return enqueue(plan_kernel, 1, kThreads, 0, stream, rows, attn, plan_view(rows, plan), attn_workers(attn, device));
}

}  // namespace kdtree
