// Joins the chunks of each tile by their log-sum-exps, and writes what rows that are not in use give. Runs after every
// attention kernel and returns at once where there is nothing to do. Chunks are added in order: equal bits for equal plans.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "attn.cuh"
#include "overlap.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLaneColumns = 8;  // one 16-byte store
constexpr int kWarpColumns = 32 * kLaneColumns;

constexpr __host__ __device__ int slices_of(int v_dim) { return ceil_div(v_dim, kWarpColumns); }

template <typename T>
__device__ void store(T *out, const float (&x)[kLaneColumns]) {
    alignas(16) T narrow[kLaneColumns];
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) narrow[i] = static_cast<T>(x[i]);
    *reinterpret_cast<uint4 *>(out) = *reinterpret_cast<const uint4 *>(narrow);
}

__device__ float warp_max(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

__device__ float warp_sum(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Joins the columns from `column` on, 8 a lane, of head `head` of row `row` of the step.
template <typename T>
__device__ void join(const AttnCall &call, const SequencePlan &plan, int row, int local, int head, int column) {
    const int lane = threadIdx.x % 32, group = group_of(call.attn), v_dim = call.attn.v_dim;
    const int tile_row = local * group + head % group, stride = plan.tiles * call.attn.kv_heads;
    const int64_t first = plan.first_partial + head / group * plan.tiles + tile_row / kTileRows;
    const auto at = [&](int chunk) {
        return (first + static_cast<int64_t>(chunk) * stride) * kTileRows + tile_row % kTileRows;
    };

    float highest = -INFINITY;
    for (int c = lane; c < plan.chunks; c += 32) highest = fmaxf(highest, call.partial_lse[at(c)]);
    highest = warp_max(highest);  // finite: every row sees itself
    const int64_t place = static_cast<int64_t>(row) * call.attn.heads + head;
    const bool idle = column >= v_dim;
    float total = 0, sum[kLaneColumns] = {};
    for (int begin = 0; begin < plan.chunks; begin += 32) {
        const int count = min(plan.chunks - begin, 32);
        const float weight = lane < count ? __expf(call.partial_lse[at(begin + lane)] - highest) : 0;
        total += weight;
#pragma unroll 4  // loads in flight
        for (int c = 0; c < count; ++c) {
            const float w = __shfl_sync(~0u, weight, c);
            if (idle) continue;
            const auto *x = reinterpret_cast<const float4 *>(call.partial_out + at(begin + c) * v_dim + column);
            const float4 a = x[0], b = x[1];
            const float values[kLaneColumns] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < kLaneColumns; ++i) sum[i] += w * values[i];
        }
    }
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) sum[i] /= total;
    if (!idle) store(static_cast<T *>(call.tensors.out) + place * v_dim + column, sum);
    if (column == 0) call.tensors.lse[place] = highest + logf(total);
}

// A warp takes up to 256 columns of one row.
template <typename T>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ AttnCall call, int64_t parts) {
    wait_for_previous();  // the attention kernel, whose end the launch overlaps
    if (!call.plan.header->combine) return;
    const kdtree_rows &rows = call.rows;
    const int heads = call.attn.heads, v_dim = call.attn.v_dim, slices = slices_of(v_dim);
    for (int64_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < parts; i += gridDim.x * kWarps) {
        const int column = static_cast<int>(i % slices) * kWarpColumns + threadIdx.x % 32 * kLaneColumns;
        const int head = static_cast<int>(i / slices % heads), row = static_cast<int>(i / slices / heads);
        int low = 0, high = rows.sequences;  // the last sequence that starts at or before the row
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (rows.row_offsets[middle] <= row ? low : high) = middle;
        }
        const int local = row - rows.row_offsets[low];
        if (local < rows.q_len[low]) {
            const SequencePlan plan = call.plan.sequences[low];
            if (plan.chunks > 1) join<T>(call, plan, row, local, head, column);
            continue;
        }
        constexpr float kZeros[kLaneColumns] = {};
        const int64_t place = static_cast<int64_t>(row) * heads + head;
        if (column < v_dim) store(static_cast<T *>(call.tensors.out) + place * v_dim + column, kZeros);
        if (column == 0) call.tensors.lse[place] = -INFINITY;
    }
}

}  // namespace

int32_t launch_combine(const AttnCall &call) {
    const int64_t parts = static_cast<int64_t>(call.rows.total_rows) * call.attn.heads * slices_of(call.attn.v_dim);
    const int64_t grid = std::min<int64_t>(ceil_div<int64_t>(parts, kWarps), 8 * call.device.multiprocessors);
    const auto kernel = call.attn.dtype == KDTREE_BFLOAT16 ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>;
    return enqueue_overlapped(kernel, static_cast<unsigned>(grid), kThreads, 0, call.stream, call, parts);
}

}  // namespace kdtree
