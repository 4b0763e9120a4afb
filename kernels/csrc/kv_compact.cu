// kv_compact: moves the KV rows of accepted paths to the end of the committed prefix. Knows bytes, not what they mean.
//
// A thread owns one column of one layer and moves it along the whole path in ascending order. Paths increase strictly,
// so a row never moves to a later slot and never to one that is still to be read: no thread needs another's progress.
#include <algorithm>

#include "overlap.cuh"

namespace kdtree {
namespace {

constexpr int kMaxCaches = 128;
constexpr int kThreads = 64;  // few, to spread small batches over all multiprocessors; path entries staged at a time
constexpr int kAhead = 8;     // rows a thread loads before it stores the first: all of most paths
constexpr int kBlocks = 10;   // per multiprocessor: more would spill the registers that hold those rows
constexpr int kMaxGridZ = 65535;

struct Cache {
    char *base;
    int64_t layer_stride, slot_stride;  // bytes
    int32_t columns;                    // of one row, each of `width` bytes
    int32_t items;                      // columns × layers
    int32_t width;
};

struct CompactCall {
    const int32_t *page_table, *seq_len, *path, *n_accepted;
    int pages, page_size, max_path, sequences;
    Cache caches[kMaxCaches];
};

struct Moves {
    int64_t source[kThreads], target[kThreads];  // bytes from the layer's start
};

template <typename Word>
__device__ __forceinline__ void move_column(char *column, const Moves &moves, int count) {
    for (int begin = 0; begin < count; begin += kAhead) {
        Word held[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (begin + i < count) {
                held[i] = *reinterpret_cast<const Word *>(column + moves.source[begin + i]);
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (begin + i < count) *reinterpret_cast<Word *>(column + moves.target[begin + i]) = held[i];
        }
    }
}

// Grid: columns of all layers, caches, sequences.
__global__ void __launch_bounds__(kThreads, kBlocks)
    compact_kernel(const __grid_constant__ CompactCall call, int first_sequence) {
    __shared__ Moves moves;
    const Cache &cache = call.caches[blockIdx.y];
    if (blockIdx.x * blockDim.x >= cache.items) return;
    const int sequence = first_sequence + blockIdx.z;
    const int item = blockIdx.x * blockDim.x + threadIdx.x, layer = item / cache.columns;
    char *const column =
        cache.base + layer * cache.layer_stride + static_cast<int64_t>(item - layer * cache.columns) * cache.width;
    wait_for_previous();
    const int length = min(call.n_accepted[sequence], call.max_path);
    const int32_t *path = call.path + static_cast<int64_t>(sequence) * call.max_path;
    const int32_t *page_table = call.page_table + static_cast<int64_t>(sequence) * call.pages;
    const int start = call.seq_len[sequence];
    let_next_begin();

    for (int begin = 0; begin < length; begin += kThreads) {
        const int step = begin + threadIdx.x;
        const int node = step < call.max_path ? path[step] : 0;
        const bool moved = step < length && node > step;
        const int count = __syncthreads_count(moved);  // they are the last of the path, because it increases strictly
        if (count == 0) continue;
        const int end = min(length, begin + kThreads);
        if (moved) {
            const auto place = [&](int row) {
                const int page = row / call.page_size;
                const int64_t first_slot = static_cast<int64_t>(page_table[page]) * call.page_size;
                return (first_slot + (row - page * call.page_size)) * cache.slot_stride;
            };
            const int at = step - (end - count);
            moves.source[at] = place(start + node);
            moves.target[at] = place(start + step);
        }
        __syncthreads();
        if (item < cache.items) {
            switch (cache.width) {
                case 16: move_column<uint4>(column, moves, count); break;
                case 8: move_column<uint2>(column, moves, count); break;
                case 4: move_column<uint32_t>(column, moves, count); break;
                default: move_column<uint16_t>(column, moves, count);
            }
        }
        __syncthreads();
    }
}

// The widest word that every row of the cache is a whole, aligned number of.
int word_bytes(const kdtree_cache &cache) {
    const uint64_t all = reinterpret_cast<uintptr_t>(cache.base) | static_cast<uint64_t>(cache.layer_stride) |
                         static_cast<uint64_t>(cache.slot_stride) | static_cast<uint64_t>(cache.row_bytes);
    for (int width = 16; width >= 2; width /= 2) {
        if (all % width == 0) return width;
    }
    return 0;
}

}  // namespace
}  // namespace kdtree

extern "C" int32_t kdtree_kv_compact(const kdtree_cache *caches, int32_t cache_count, const int32_t *page_table, int32_t pages,
                                     int32_t page_size, const int32_t *seq_len, const int32_t *path, int32_t max_path,
                                     const int32_t *n_accepted, int32_t sequences, kdtree_stream stream) {
    using namespace kdtree;
    if (!caches || cache_count < 1 || pages < 0 || page_size < 1 || max_path < 0 || sequences < 0) {
        return KDTREE_BAD_ARGUMENT;
    }
    if (cache_count > kMaxCaches) return KDTREE_UNSUPPORTED_SHAPE;
    CompactCall call{page_table, seq_len, path, n_accepted, pages, page_size, max_path, sequences, {}};
    int most = 0;
    for (int i = 0; i < cache_count; ++i) {
        const kdtree_cache &cache = caches[i];
        if (cache.layers < 0 || cache.row_bytes < 0) return KDTREE_BAD_ARGUMENT;
        const int width = word_bytes(cache);
        if (width == 0) return KDTREE_MISALIGNED;
        const int64_t items = int64_t{cache.row_bytes / width} * cache.layers;
        if (items > INT32_MAX - kThreads) return KDTREE_UNSUPPORTED_SHAPE;
        if (items > 0 && !cache.base) return KDTREE_BAD_ARGUMENT;
        call.caches[i] = {static_cast<char *>(cache.base), cache.layer_stride,          cache.slot_stride,
                          cache.row_bytes / width,         static_cast<int32_t>(items), width};
        most = std::max(most, call.caches[i].items);
    }
    if (sequences == 0 || max_path == 0 || pages == 0 || most == 0) return KDTREE_OK;
    if (!page_table || !seq_len || !path || !n_accepted) return KDTREE_BAD_ARGUMENT;
    for (int first = 0; first < sequences; first += kMaxGridZ) {
        const dim3 grid(ceil_div(most, kThreads), cache_count, std::min(kMaxGridZ, sequences - first));
        KDTREE_TRY(enqueue_overlapped(compact_kernel, grid, kThreads, 0, stream, call, first));
    }
    return KDTREE_OK;
}
