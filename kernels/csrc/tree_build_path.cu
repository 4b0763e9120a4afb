// tree_build_path: the draft tree where a candidate's log-prob depends on its parent. Knows no model.
//
// Two kernels. The first sorts every row that a node may need: what a tree needs is known only when it is grown, and then each
// row would be waited for. The second grows a tree per block, by one warp (frontier), with the first ranks of all rows in
// shared memory; the rest is read where the first kernel left it. kernels/reference/tree_build_path.py is the definition.
#include <algorithm>

#include "topk_select.cuh"
#include "tree_build_frontier.cuh"
#include "tree_build_write.cuh"

namespace kdtree {
namespace {

constexpr int kMaxPathWidth = 128;
constexpr int kSortThreads = 256;
constexpr int kLeastSorted = 32;  // so that the threads of a warp read the same row
constexpr int kMediumThreads = 512;
constexpr int kMaxThreads = 1024;
constexpr int kMaskRows = 256;    // masks made at a time, at most: shared memory is for rows
constexpr uint32_t kMissing = 0;  // below the ordered bits of every float

struct PathSizes {
    BuildSizes tree;  // its width: ranks kept of each row; its stride: candidates of a depth
    int rows;         // of a sequence: the root's, and one for each candidate of all depths but the last
    int held;         // ranks of each in shared memory
    int sorted_size;  // a power of two, at least k
};

// The rows of one sequence, sorted.
struct PathRows {
    const Child *all, *first;  // [rows, width]; their first ranks in shared memory [rows, held]
    int levels, k, width, held;

    __device__ Child at(int depth, int parent, int rank) const {
        if (depth > levels || rank >= width) return {NAN, 0};
        const int row = depth == 1 ? 0 : 1 + (depth - 2) * k + parent;
        return rank < held ? first[row * held + rank] : all[row * width + rank];
    }
};

// A thread per candidate: it goes where the number of better ones in its row says.
__global__ void __launch_bounds__(kSortThreads) sort_rows(const kdtree_path_input in, const PathSizes sizes, Child *sorted) {
    __shared__ uint64_t keys[kSortThreads];
    const int group = threadIdx.x / sizes.sorted_size, i = threadIdx.x % sizes.sorted_size;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (kSortThreads / sizes.sorted_size) + group;
    const int64_t sequence = row / sizes.rows, below = sequence * (in.levels - 1) * in.k + row % sizes.rows - 1;
    float value = NAN;
    if (sequence < in.batch && i < in.k) {
        value = row % sizes.rows ? in.conditional[below * in.k + i] : in.first[sequence * in.k + i];
    }
    const bool finite = fabsf(value) <= FLT_MAX;
    const uint64_t key = topk::make_key(finite ? topk::ordered(fminf(value, 0)) : kMissing, topk::tie_of(i));
    keys[threadIdx.x] = key;
    __syncthreads();
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < sizes.sorted_size; ++other) rank += keys[group * sizes.sorted_size + other] > key;
    if (sequence < in.batch && rank < sizes.tree.width) {
        sorted[row * sizes.tree.width + rank] = {finite ? topk::from_ordered(topk::key_value(key)) : NAN, i};
    }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    grow_paths(const kdtree_path_input in, const kdtree_tree out, const PathSizes sizes, const Child *sorted) {
    KDTREE_DYNAMIC_SHARED(16, char, memory);
    const BuildSizes &tree = sizes.tree;
    Work<kThreads> &work = *reinterpret_cast<Work<kThreads> *>(memory);
    uint32_t *const masks = reinterpret_cast<uint32_t *>(memory + sizeof(work));
    Child *const first = reinterpret_cast<Child *>(masks + mask_words(tree));
    const Child *const all = sorted + static_cast<int64_t>(blockIdx.x) * sizes.rows * tree.width;
    const int budget = max(min(in.budget[blockIdx.x], in.max_budget), 0);
    clear_masks<kThreads>(tree, masks);
    for (int i = threadIdx.x; i < sizes.rows * sizes.held; i += kThreads) {
        first[i] = all[i / sizes.held * tree.width + i % sizes.held];
    }
    __syncthreads();
    if (warp_id() == 0) {
        const PathRows rows{all, first, tree.levels, in.k, tree.width, sizes.held};
        work.totals[0] = grow_frontier(rows, budget, work);
    }
    __syncthreads();
    const int nodes = work.totals[0] + 1;
    write_fields<kThreads>(out, tree, work.answer, in.ids + static_cast<int64_t>(blockIdx.x) * in.levels * in.k, nodes,
                           in.root[blockIdx.x], in.seq_len[blockIdx.x]);
    write_masks<kThreads>(tree, work.answer, nodes, masks,
                          out.ancestors + static_cast<int64_t>(blockIdx.x) * tree.size * tree.words);
}

PathSizes sizes_of(const kdtree_path_input &in) {
    PathSizes sizes{};
    BuildSizes &tree = sizes.tree;
    tree.width = std::min(in.k, in.max_budget);
    tree.levels = tree.width ? std::min(in.levels, in.max_budget) : 0;
    tree.stride = in.k;
    tree.size = in.max_budget + 1;
    tree.words = ceil_div(tree.size, 32);
    sizes.rows = in.levels && tree.width ? 1 + (in.levels - 1) * in.k : 0;
    sizes.sorted_size = kLeastSorted;
    while (sizes.sorted_size < in.k) sizes.sorted_size *= 2;
    return sizes;
}

size_t sorted_bytes(const kdtree_path_input &in, const PathSizes &sizes) {
    return sizeof(Child) * in.batch * sizes.rows * sizes.tree.width;
}

template <int kThreads>
int32_t launch(const kdtree_path_input &in, const kdtree_tree &out, PathSizes sizes, const Device &device, const Child *sorted,
               cudaStream_t stream) {
    BuildSizes &tree = sizes.tree;
    tree.vectors = tree.words % 4 == 0 && aligned(out.ancestors, 16);
    tree.pitch = tree.vectors ? tree.words + 4 : tree.words | 1;  // spreads rows over the banks
    tree.tile_rows = std::min(tree.size, kMaskRows);
    size_t bytes = sizeof(Work<kThreads>) + mask_words(tree) * sizeof(uint32_t);
    const int64_t room = device.shared_bytes - static_cast<int64_t>(bytes);
    if (room < 0) return KDTREE_UNSUPPORTED_ARCHITECTURE;
    if (sizes.rows) {
        sizes.held = static_cast<int>(std::min<int64_t>(tree.width, room / (sizeof(Child) * sizes.rows)));
    }
    bytes += sizeof(Child) * sizes.rows * sizes.held;
    const auto kernel = grow_paths<kThreads>;
    KDTREE_TRY(from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))));
    return enqueue(kernel, in.batch, kThreads, bytes, stream, in, out, sizes, sorted);
}

int32_t check(const kdtree_path_input &in) {
    if (in.batch < 0 || in.levels < 0 || in.k < 0 || in.max_budget < 0) return KDTREE_BAD_ARGUMENT;
    if (in.levels > kMaxLevels || in.max_budget > kMaxBudget || in.k > kMaxPathWidth) return KDTREE_UNSUPPORTED_SHAPE;
    return static_cast<int64_t>(in.batch) * sizes_of(in).rows > INT32_MAX ? KDTREE_UNSUPPORTED_SHAPE : KDTREE_OK;
}

}  // namespace
}  // namespace kdtree

extern "C" {

int32_t kdtree_tree_build_path_workspace(const kdtree_path_input *in, size_t *bytes) {
    using namespace kdtree;
    if (!in || !bytes) return KDTREE_BAD_ARGUMENT;
    KDTREE_TRY(check(*in));
    *bytes = sorted_bytes(*in, sizes_of(*in));
    return KDTREE_OK;
}

int32_t kdtree_tree_build_path(const kdtree_path_input *in, const kdtree_tree *out, void *workspace, size_t workspace_bytes,
                               kdtree_stream stream) {
    using namespace kdtree;
    if (!in || !out) return KDTREE_BAD_ARGUMENT;
    KDTREE_TRY(check(*in));
    if (in->batch == 0) return KDTREE_OK;
    const PathSizes sizes = sizes_of(*in);
    if ((sizes.rows && (!in->first || !in->ids)) || (sizes.rows > 1 && !in->conditional)) return KDTREE_BAD_ARGUMENT;
    if (!in->root || !in->seq_len || !in->budget || !complete(*out)) return KDTREE_BAD_ARGUMENT;
    if (sizes.rows && !workspace) return KDTREE_BAD_ARGUMENT;
    if (workspace_bytes < sorted_bytes(*in, sizes)) return KDTREE_WORKSPACE_TOO_SMALL;
    Device device;
    KDTREE_TRY(current_device(&device));
    Child *const sorted = static_cast<Child *>(workspace);
    if (sizes.rows) {
        const int blocks = ceil_div(in->batch * sizes.rows, kSortThreads / sizes.sorted_size);
        KDTREE_TRY(enqueue(sort_rows, blocks, kSortThreads, 0, stream, *in, sizes, sorted));
    }
    if (sizes.tree.size <= kMediumThreads) return launch<kMediumThreads>(*in, *out, sizes, device, sorted, stream);
    return launch<kMaxThreads>(*in, *out, sizes, device, sorted, stream);
}

}  // extern "C"
