// tree_build: the `budget` most probable prefixes of each sequence as a tree, one CTA per sequence. Knows no model.
//
// Up to 63 nodes a warp grows the tree best-first with its frontier in registers (best_first, small). Larger trees are cut
// out: a cut-off found by counting (bound), all nodes above it (expand), a sort (order). Where no cut-off is tight (very many
// equal scores, costs of hundreds of nats) a warp grows them best-first too (frontier). All give the same bits;
// kernels/reference/tree_build.py is the definition.
#include <algorithm>

#include "tree_build_best_first.cuh"
#include "tree_build_bound.cuh"
#include "tree_build_expand.cuh"
#include "tree_build_frontier.cuh"
#include "tree_build_order.cuh"
#include "tree_build_rows.cuh"
#include "tree_build_small.cuh"
#include "tree_build_write.cuh"

namespace kdtree {
namespace {

constexpr int kSmallThreads = 512;
constexpr int kMediumThreads = 512;
constexpr int kMaxThreads = 1024;
constexpr int kLeastTile = 64;    // masks made at a time, where shared memory is short
constexpr float kReach = 16;      // nats the first count covers; trees of 1023 nodes rarely need more
constexpr float kFarReach = 256;  // and the second, where it does not

__host__ __device__ int path_counts(const BuildSizes &sizes) { return 2 * kBins * (sizes.levels + 1); }

__device__ __forceinline__ int budget_of(const kdtree_build_input &in) {
    return max(min(in.budget[blockIdx.x], in.max_budget), 0);
}

__global__ void __launch_bounds__(kSmallThreads, 1)
    small_kernel(const kdtree_build_input in, const kdtree_tree out, const BuildSizes sizes) {
    KDTREE_DYNAMIC_SHARED(16, char, memory);
    __shared__ SmallWork work;
    const Candidates rows{reinterpret_cast<float *>(memory), reinterpret_cast<int32_t *>(memory) + candidate_values(sizes)};
    const int budget = budget_of(in), root = in.root[blockIdx.x], seq_len = in.seq_len[blockIdx.x];
    pack_rows<kSmallThreads, true>(
        in, sizes, rows, budget, [&] { clear_links<kSmallThreads>(work); },
        [&](int level, int count) {
            if (lane_id() == 0) work.count[level] = count;
        });
    __syncthreads();
    const int warp = __shfl_sync(kFullWarp, warp_id(), 0);
    if (warp == 0) {
        const int made = __shfl_sync(kFullWarp, count_nodes(sizes, work, budget), 0);
        grow_best_first(sizes, rows.values, made, work.popped);
        if (lane_id() == 0) work.made = made;
    }
    __syncthreads();
    if (warp < 2) {
        write_small_fields(out, sizes, rows, work, root, seq_len);
    } else if (warp == 2) {
        write_small_masks(out, sizes, work);
    }
}

// Cuts the tree out. Returns the number of nodes besides the root, -1 where no cut-off is tight enough.
template <int kThreads>
__device__ __forceinline__ int cut_out(const BuildSizes &sizes, const float *values, const Costs &costs, Work<kThreads> &work,
                                       int budget) {
    float scale = kBins / kReach;  // bins per nat
    if (warp_id() == 0) measure_levels(sizes, values, costs, work, scale);
    __syncthreads();
    int bins = work.everything ? 0 : count_paths(sizes, costs, work, budget);
    if (bins == kBins) {
        scale = kBins / kFarReach;
        __syncthreads();
        clear_counts(sizes, costs, work);
        for (int level = warp_id(); level < sizes.levels; level += kThreads / 32) {
            quantise_row(sizes, values, costs, level, scale);
        }
        __syncthreads();
        if (warp_id() == 0) measure_levels(sizes, values, costs, work, scale);
        __syncthreads();
        bins = count_paths(sizes, costs, work, budget);
        if (bins == kBins) return -1;
    }
    float reach = bins / scale * (1 + kSlack) + FLT_MIN;
    const int found = expand(sizes, values, work, work.everything ? -INFINITY : -reach, budget, reach);
    if (found > Work<kThreads>::kCapacity) return -1;
    if (work.everything) {
        reach = greatest_cost(work, found);
    } else if (found <= budget) {
        return -1;  // only rounding beyond the slack could do that
    }
    work.table[threadIdx.x] = 0;
    __syncthreads();
    return order_nodes(work, found, budget, reach);
}

// kWide: the candidates lie in the workspace, and only the frontier serves.
template <int kThreads, bool kWide>
__global__ void __launch_bounds__(kThreads, 1)
    large_kernel(const kdtree_build_input in, const kdtree_tree out, const BuildSizes sizes, float *workspace) {
    KDTREE_DYNAMIC_SHARED(16, char, memory);
    Work<kThreads> &work = *reinterpret_cast<Work<kThreads> *>(memory);
    uint32_t *const masks = reinterpret_cast<uint32_t *>(memory + sizeof(work));
    int *const paths = reinterpret_cast<int *>(masks) + mask_words(sizes);
    float *values =
        kWide ? workspace + blockIdx.x * 2 * candidate_values(sizes) : reinterpret_cast<float *>(paths + path_counts(sizes));
    const Candidates rows{values, reinterpret_cast<int32_t *>(values) + candidate_values(sizes)};
    const Costs costs{reinterpret_cast<uint8_t *>(rows.tokens + candidate_values(sizes)), paths};

    const int budget = budget_of(in), root = in.root[blockIdx.x], seq_len = in.seq_len[blockIdx.x];
    pack_rows<kThreads, false>(
        in, sizes, rows, budget,
        [&] {
            clear_masks<kThreads>(sizes, masks);
            if constexpr (!kWide) clear_counts(sizes, costs, work);
        },
        [&](int level, int count) {
            if (lane_id() == 0) work.count[level] = count;
            if constexpr (!kWide) quantise_row(sizes, values, costs, level, kBins / kReach);
        });
    __syncthreads();

    int made = -1;
    if constexpr (!kWide) {
        if (budget > 0 && sizes.levels > 0) made = cut_out(sizes, values, costs, work, budget);
    }
    if (made < 0) {
        __syncthreads();
        if (warp_id() == 0) work.totals[0] = grow_frontier(DepthRows{values, sizes.stride}, budget, work);
        __syncthreads();
        made = work.totals[0];
    }
    write_fields<kThreads>(out, sizes, work.answer, rows.tokens, made + 1, root, seq_len);
    write_masks<kThreads>(sizes, work.answer, made + 1, masks,
                          out.ancestors + static_cast<int64_t>(blockIdx.x) * sizes.size * sizes.words);
}

BuildSizes sizes_of(const kdtree_build_input &in) {
    BuildSizes sizes{};
    sizes.width = std::min(in.k, in.max_budget);
    sizes.levels = sizes.width ? std::min(in.levels, in.max_budget) : 0;
    sizes.stride = std::max(sizes.width + kSentinels, kLeastStride);
    sizes.size = in.max_budget + 1;
    sizes.words = ceil_div(sizes.size, 32);
    return sizes;
}

bool is_small(const BuildSizes &sizes) { return sizes.size <= kSmallNodes; }
bool is_medium(const BuildSizes &sizes) { return sizes.size <= kMediumThreads; }

size_t candidate_bytes(const BuildSizes &sizes) { return candidate_values(sizes) * (sizeof(float) + sizeof(int32_t)); }

// Shared memory for the rows of a large tree.
size_t row_bytes(const BuildSizes &sizes) {
    return path_counts(sizes) * sizeof(int) + candidate_bytes(sizes) + sizes.levels * quantised_stride(sizes);
}

bool is_wide(const BuildSizes &sizes, const Device &device) {
    if (is_small(sizes)) return false;
    const size_t work = is_medium(sizes) ? sizeof(Work<kMediumThreads>) : sizeof(Work<kMaxThreads>);
    const size_t masks = sizeof(uint32_t) * kLeastTile * (sizes.words + 4);
    return work + masks + row_bytes(sizes) > static_cast<size_t>(device.shared_bytes);
}

int32_t launch_small(const kdtree_build_input &in, const kdtree_tree &out, const BuildSizes &sizes, cudaStream_t stream) {
    return enqueue(small_kernel, in.batch, kSmallThreads, candidate_bytes(sizes), stream, in, out, sizes);
}

template <int kThreads, bool kWide>
int32_t launch_large(const kdtree_build_input &in, const kdtree_tree &out, BuildSizes sizes, const Device &device,
                     void *workspace, cudaStream_t stream) {
    sizes.vectors = sizes.words % 4 == 0 && aligned(out.ancestors, 16);
    sizes.pitch = sizes.vectors ? sizes.words + 4 : sizes.words | 1;  // spreads rows over the banks
    size_t bytes = sizeof(Work<kThreads>);
    if (!kWide) bytes += row_bytes(sizes);
    const int64_t room = (device.shared_bytes - static_cast<int64_t>(bytes)) / int64_t{sizeof(uint32_t)};
    sizes.tile_rows = static_cast<int>(std::min<int64_t>(sizes.size, (room - 4) / sizes.pitch));
    if (sizes.tile_rows < 1) return KDTREE_UNSUPPORTED_ARCHITECTURE;
    bytes += mask_words(sizes) * sizeof(uint32_t);
    const auto kernel = large_kernel<kThreads, kWide>;
    KDTREE_TRY(from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))));
    return enqueue(kernel, in.batch, kThreads, bytes, stream, in, out, sizes, static_cast<float *>(workspace));
}

int32_t check(const kdtree_build_input &in) {
    if (in.batch < 0 || in.levels < 0 || in.k < 0 || in.max_budget < 0) return KDTREE_BAD_ARGUMENT;
    if (in.levels > kMaxLevels || in.max_budget > kMaxBudget) return KDTREE_UNSUPPORTED_SHAPE;
    return KDTREE_OK;
}

}  // namespace
}  // namespace kdtree

extern "C" {

int32_t kdtree_tree_build_workspace(const kdtree_build_input *in, size_t *bytes) {
    using namespace kdtree;
    if (!in || !bytes) return KDTREE_BAD_ARGUMENT;
    KDTREE_TRY(check(*in));
    Device device;
    KDTREE_TRY(current_device(&device));
    const BuildSizes sizes = sizes_of(*in);
    *bytes = is_wide(sizes, device) ? in->batch * candidate_bytes(sizes) : 0;
    return KDTREE_OK;
}

int32_t kdtree_tree_build(const kdtree_build_input *in, const kdtree_tree *out, void *workspace, size_t workspace_bytes,
                          kdtree_stream stream) {
    using namespace kdtree;
    if (!in || !out) return KDTREE_BAD_ARGUMENT;
    KDTREE_TRY(check(*in));
    if (in->batch == 0) return KDTREE_OK;
    const BuildSizes sizes = sizes_of(*in);
    if ((sizes.levels && (!in->logprobs || !in->ids)) || !in->root || !in->seq_len || !in->budget) return KDTREE_BAD_ARGUMENT;
    if (!complete(*out)) return KDTREE_BAD_ARGUMENT;
    if (is_small(sizes)) return launch_small(*in, *out, sizes, stream);
    Device device;
    KDTREE_TRY(current_device(&device));
    if (is_wide(sizes, device)) {
        if (!workspace) return KDTREE_BAD_ARGUMENT;
        if (workspace_bytes < in->batch * candidate_bytes(sizes)) return KDTREE_WORKSPACE_TOO_SMALL;
        return launch_large<kMaxThreads, true>(*in, *out, sizes, device, workspace, stream);
    }
    if (is_medium(sizes)) return launch_large<kMediumThreads, false>(*in, *out, sizes, device, nullptr, stream);
    return launch_large<kMaxThreads, false>(*in, *out, sizes, device, nullptr, stream);
}

}  // extern "C"
