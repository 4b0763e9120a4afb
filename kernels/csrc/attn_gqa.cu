// Grouped-query attention of draft trees and prompt chunks over a paged KV cache, on mma.sync tensor cores (sm_80 and newer).
// Knows one item at a time: up to 64 query rows of one key head against a run of KV blocks; attn_plan.cu decides which.
//
// Q stays in shared memory; K and V of a step each have one buffer, and each is copied while the other is in use.
#include <algorithm>

#include "attn_gqa_softmax.cuh"

namespace kdtree {
namespace {

using namespace gqa;

__device__ __forceinline__ uint32_t low_bits(int count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }

// Bit i: whether own row `node` sees own row `column` + i, where negative rows are the prefix; 32 of sees() at once.
__device__ __forceinline__ uint32_t sees_32(const kdtree_rows &rows, int sequence, int node, int column) {
    if (rows.causal[sequence]) return low_bits(node - column + 1);
    const uint32_t *bits = rows.ancestors + static_cast<int64_t>(rows.row_offsets[sequence] + node) * rows.ancestor_words;
    const auto word = [&](int i) { return i < 0 ? ~0u : i < rows.ancestor_words ? bits[i] : 0; };
    return __funnelshift_r(word(column >> 5), word((column >> 5) + 1), column & 31);
}

// The tile's masks for one step. Rows that are not the item's see nothing.
template <int D>
__device__ __forceinline__ void write_masks(const AttnCall &call, const Item &item, int slot, int end, uint32_t *masks) {
    constexpr int kWords = Shape<D>::kMaskWords, kThreadWords = kTileRows * kWords / kThreads;
    const int seq_len = call.rows.seq_len[item.sequence], first = threadIdx.x * kThreadWords, row = first / kWords;
    const int node = (item.row_begin + row) / group_of(call.attn);
#pragma unroll
    for (int w = 0; w < kThreadWords; ++w) {
        const int start = slot + 32 * (first % kWords + w);
        const bool used = row < item.row_count;
        masks[first + w] = used ? sees_32(call.rows, item.sequence, node, start - seq_len) & low_bits(end - start) : 0;
    }
}

// Calls copy(place, row, chunk, index) for every 16-byte chunk of `Count` rows, spread over the warp: chunk `chunk` of row
// `row` belongs `place` bytes after the first row's start. Lane i has the index of row i.
template <int D, int Count, typename Copy>
__device__ __forceinline__ void for_each_chunk(int index, Copy copy) {
    constexpr int kLanes = Shape<D>::kRowLanes, kRows = 32 / kLanes;  // of one instruction
    const int row = threadIdx.x % 32 / kLanes, chunk = threadIdx.x % kLanes;
    const uint32_t place = swizzled(row, chunk, Shape<D>::kRowBytes);
#pragma unroll
    for (int i = 0; i < Count; i += kRows) {
        const int from = __shfl_sync(~0u, index, i + row);
        if (kLanes == D / 8 || chunk < D / 8) copy((place ^ (i % 8 << 4)) + i * Shape<D>::kRowBytes, i + row, chunk, from);
    }
}

// Where this lane's row of the next step to copy lies. The page is loaded a step before it is needed.
template <int D>
struct Cursor {
    const int *entry;  // of the page table
    int offset;        // in the page
    int left;          // slots from this row to the end
    int page;

    __device__ __forceinline__ Cursor(const kdtree_rows &rows, int sequence, int begin, int end) {
        const int slot = begin + threadIdx.x / 32 * Shape<D>::kCopySlots + threadIdx.x % Shape<D>::kCopySlots;
        entry = rows.page_table + static_cast<int64_t>(sequence) * rows.pages + slot / rows.page_size;
        offset = slot % rows.page_size;
        left = end - slot;
        page = left > 0 ? *entry : 0;
    }

    __device__ __forceinline__ void advance(int page_size) {
        constexpr int kSlots = Shape<D>::kStepSlots;
        offset += kSlots % page_size;
        entry += kSlots / page_size;
        if (offset >= page_size) offset -= page_size, ++entry;
        left -= kSlots;
        if (left > 0) page = *entry;
    }
};

// This warp's share of the copy of one step's K or V; zeros past the end.
template <typename T, int D>
__device__ __forceinline__ void copy_half(const void *cache, int64_t slot_stride, int kv_head, int page_size,
                                          const Cursor<D> &cursor, uint32_t half) {
    using S = Shape<D>;
    const auto *source = reinterpret_cast<const char *>(static_cast<const T *>(cache) + kv_head * D);
    const int stride = static_cast<int>(slot_stride) * sizeof(T), rows = __shfl_sync(~0u, cursor.left, 0);
    const uint32_t destination = half + threadIdx.x / 32 * S::kCopySlots * S::kRowBytes;
    const int index = cursor.left > 0 ? cursor.page * page_size + cursor.offset : 0;
    for_each_chunk<D, S::kCopySlots>(index, [&](uint32_t place, int row, int chunk, int from) {
        cp_async_16(destination + place, source + chunk * 16 + static_cast<int64_t>(from) * stride, row < rows);
    });
}

// Row of the step's q and out, counted in heads, of a tile row in use.
__device__ __forceinline__ int query_place(const AttnCall &call, const Item &item, int row) {
    const int group = group_of(call.attn), node = (item.row_begin + row) / group;
    return (call.rows.row_offsets[item.sequence] + node) * call.attn.heads + item.kv_head * group +
           (item.row_begin + row) % group;
}

template <typename T, int D>
__device__ __forceinline__ void copy_queries(const AttnCall &call, const Item &item, uint32_t tile) {
    constexpr int kRows = kTileRows / kWarps;
    const auto *queries = static_cast<const T *>(call.tensors.q);
    const int begin = threadIdx.x / 32 * kRows, mine = begin + threadIdx.x % kRows;
    const uint32_t destination = tile + begin * Shape<D>::kRowBytes;
    const int index = mine < item.row_count ? query_place(call, item, mine) : 0;
    for_each_chunk<D, kRows>(index, [&](uint32_t place, int row, int chunk, int from) {
        cp_async_16(destination + place, queries + static_cast<int64_t>(from) * D + chunk * 8, begin + row < item.row_count);
    });
}

// Divides by the sums. Rows that saw nothing: out 0, lse -inf.
template <typename T, int D>
__device__ __forceinline__ void store(const AttnCall &call, const Item &item, const Softmax<D> &state, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Shape<D>::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + 16 * i + 8 * half + lane / 4;
            if (row >= item.row_count) continue;
            const float sum = state.sum[i][half], inverse = sum > 0 ? 1 / sum : 0;
            const float lse = sum > 0 ? state.max[i][half] * call.attn.scale + logf(sum) : -INFINITY;
            if (item.partial < 0) {
                const int64_t place = query_place(call, item, row);
                auto *out = reinterpret_cast<uint32_t *>(static_cast<T *>(call.tensors.out) + place * D) + lane % 4;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    out[n * 4] = pack2<T>(state.out[i][n][2 * half] * inverse, state.out[i][n][2 * half + 1] * inverse);
                }
                if (lane % 4 == 0) call.tensors.lse[place] = lse;
            } else {
                const int64_t place = static_cast<int64_t>(item.partial) * kTileRows + row;
                auto *out = reinterpret_cast<float2 *>(call.partial_out + place * D) + lane % 4;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    out[n * 4] = make_float2(state.out[i][n][2 * half] * inverse, state.out[i][n][2 * half + 1] * inverse);
                }
                if (lane % 4 == 0) call.partial_lse[place] = lse;
            }
        }
    }
}

template <typename T, int D>
__device__ __forceinline__ void run_item(const AttnCall &call, const Item &item, char *shared) {
    using S = Shape<D>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_group = warp % S::kRowGroups, slot_group = warp / S::kRowGroups, first_row = row_group * S::kWarpRows;
    const int begin = item.block_begin * kBlockSlots, end = min(item.block_end * kBlockSlots, item.kv_len);  // slots
    const uint32_t keys = shared_address(shared), values = keys + S::kHalfBytes, queries = values + S::kHalfBytes;
    auto *masks = reinterpret_cast<uint32_t *>(shared + 2 * S::kHalfBytes + S::kQueryBytes);

    Cursor<D> cursor(call.rows, item.sequence, begin, end);
    const auto copy_keys = [&] {
        const kdtree_attn_tensors &t = call.tensors;
        copy_half<T, D>(t.k_cache, t.k_slot_stride, item.kv_head, call.rows.page_size, cursor, keys);
        cp_async_commit();
    };
    const auto copy_values = [&] {
        const kdtree_attn_tensors &t = call.tensors;
        copy_half<T, D>(t.v_cache, t.v_slot_stride, item.kv_head, call.rows.page_size, cursor, values);
        cp_async_commit();
        cursor.advance(call.rows.page_size);
    };
    copy_queries<T, D>(call, item, queries);
    copy_keys();

    // In these fragments lane i gives the address of row i % 16; in a K fragment, of row i % 8 + 8 * (i / 16).
    const uint32_t a_lane = swizzled(lane % 16, lane / 16, S::kRowBytes);
    const uint32_t b_lane = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2, S::kRowBytes);
    const uint32_t my_queries = queries + first_row * S::kRowBytes + a_lane;
    const uint32_t my_keys = keys + slot_group * kWarpSlots * S::kRowBytes + b_lane;
    const uint32_t my_values = values + slot_group * kWarpSlots * S::kRowBytes + a_lane;
    const uint32_t *my_masks = masks + (first_row + lane / 4) * S::kMaskWords + slot_group * (kWarpSlots / 32);

    Softmax<D> state{};
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) state.max[i][0] = state.max[i][1] = -INFINITY;
    const float scale = call.attn.scale * kLog2e;
    const bool idle = first_row >= item.row_count;
    const int unmasked = min(call.rows.seq_len[item.sequence], end);
    for (int slot = begin; slot < end; slot += S::kStepSlots) {
        const bool masked = slot + S::kStepSlots > unmasked;
        cp_async_wait<0>();
        __syncthreads();  // K has arrived, and nobody reads the V or the masks of the step before any more
        copy_values();
        if (masked) write_masks<D>(call, item, slot, end, masks);
        Scores<D> s = {};
        if (!idle) score<T, D>(s, my_queries, my_keys);
        cp_async_wait<0>();
        __syncthreads();  // V has arrived, and nobody reads this K any more
        if (slot + S::kStepSlots < end) copy_keys();
        if (idle) continue;
        if (masked) hide<D>(s, my_masks);
        absorb<T, D>(state, s, my_values, scale);
    }
    join_slot_groups<D>(state, reinterpret_cast<float *>(shared), row_group, slot_group, scale);
    if (slot_group == 0 && !idle) store<T, D>(call, item, state, first_row);
    __syncthreads();  // shared memory is free for the next item
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads, kMaxCtas) gqa_kernel(const __grid_constant__ AttnCall call) {
    KDTREE_DYNAMIC_SHARED(1024, char, shared);
    const int items = call.plan.header->items;
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
        const Item item = call.plan.items[i];
        run_item<T, D>(call, item, shared);
    }
}

template <typename T, int D>
int32_t launch(const AttnCall &call, int grid) {
    constexpr int kShared = Shape<D>::kSharedBytes;
    KDTREE_TRY(from_cuda(cudaFuncSetAttribute(gqa_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)));
    return enqueue(gqa_kernel<T, D>, grid, kThreads, kShared, call.stream, call);
}

template <int D>
int32_t launch(const AttnCall &call, int grid) {
    return call.attn.dtype == KDTREE_BFLOAT16 ? launch<__nv_bfloat16, D>(call, grid) : launch<__half, D>(call, grid);
}

template <int D>
int ctas(const Device &device) {
    constexpr int kReserved = 1024;  // that the driver takes of each block's shared memory, and once more of the whole
    return std::clamp((device.shared_bytes + kReserved) / (Shape<D>::kSharedBytes + kReserved), 1, kMaxCtas);
}

}  // namespace

bool gqa_serves(int head_dim) { return head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256; }

int gqa_workers_per_sm(const kdtree_attn &attn, const Device &device) {
    switch (attn.head_dim) {
        case 64: return ctas<64>(device);
        case 96: return ctas<96>(device);
        case 128: return ctas<128>(device);
        default: return ctas<256>(device);
    }
}

int32_t launch_gqa(const AttnCall &call) {
    if (!(call.attn.scale > 0)) return KDTREE_BAD_ARGUMENT;  // maxima are kept of scores that are not scaled yet
    constexpr int64_t kMost = INT32_MAX / 2;  // strides in bytes and places have 32 bits: one multiplication an address
    if (std::max(call.tensors.k_slot_stride, call.tensors.v_slot_stride) > kMost) return KDTREE_UNSUPPORTED_SHAPE;
    if (static_cast<int64_t>(call.rows.total_rows) * call.attn.heads > kMost || call.tensors.slots > kMost) {
        return KDTREE_UNSUPPORTED_SHAPE;
    }
    const int64_t items = plan_limits(call.rows, call.attn, call.device).items;
    const int grid = static_cast<int>(std::min<int64_t>(attn_workers(call.attn, call.device), items));
    switch (call.attn.head_dim) {
        case 64: return launch<64>(call, grid);
        case 96: return launch<96>(call, grid);
        case 128: return launch<128>(call, grid);
        case 256: return launch<256>(call, grid);
        default: return KDTREE_UNSUPPORTED_SHAPE;
    }
}

}  // namespace kdtree
