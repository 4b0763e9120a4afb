// Joins the chunks of each tile by their log-sum-exps, and writes what rows that are not in use give. Runs after every
// attention kernel and returns at once where there is nothing to do. Chunks are added in order: equal bits for equal plans.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "attn.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLaneColumns = 8;  // one 16-byte store

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

// One warp joins one row: head `head` of row `row` of the step.
template <typename T>
__device__ void join(const AttnCall &call, const SequencePlan &plan, int64_t row, int local, int head) {
    const int lane = threadIdx.x % 32, group = group_of(call.attn), v_dim = call.attn.v_dim;
    const int tile_row = local * group + head % group, stride = plan.tiles * call.attn.kv_heads;
    const int64_t first = plan.first_partial + head / group * plan.tiles + tile_row / kTileRows;
    const auto at = [&](int chunk) { return (first + static_cast<int64_t>(chunk) * stride) * kTileRows + tile_row % kTileRows; };

    float highest = -INFINITY;
    for (int c = lane; c < plan.chunks; c += 32) highest = fmaxf(highest, call.partial_lse[at(c)]);
    highest = warp_max(highest);  // finite: every row sees itself
    float total = 0;
    for (int c = lane; c < plan.chunks; c += 32) total += __expf(call.partial_lse[at(c)] - highest);
    total = warp_sum(total);

    const int64_t place = row * call.attn.heads + head;
    for (int column = lane * kLaneColumns; column < v_dim; column += 32 * kLaneColumns) {
        float sum[kLaneColumns] = {};
        for (int c = 0; c < plan.chunks; ++c) {
            const int64_t source = at(c);
            const float weight = __expf(call.partial_lse[source] - highest) / total;
            const auto *x = reinterpret_cast<const float4 *>(call.partial_out + source * v_dim + column);
            const float4 a = x[0], b = x[1];
            const float values[kLaneColumns] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < kLaneColumns; ++i) sum[i] += weight * values[i];
        }
        store(static_cast<T *>(call.tensors.out) + place * v_dim + column, sum);
    }
    if (lane == 0) call.tensors.lse[place] = highest + logf(total);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) combine_kernel(AttnCall call) {
    if (!call.plan.header->combine) return;
    const kdtree_rows &rows = call.rows;
    const int heads = call.attn.heads, v_dim = call.attn.v_dim, lane = threadIdx.x % 32;
    const int64_t count = static_cast<int64_t>(rows.total_rows) * heads;
    for (int64_t i = blockIdx.x * kWarps + threadIdx.x / 32; i < count; i += gridDim.x * kWarps) {
        const int row = static_cast<int>(i / heads), head = static_cast<int>(i % heads);
        int low = 0, high = rows.sequences;  // the last sequence that starts at or before the row
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (rows.row_offsets[middle] <= row ? low : high) = middle;
        }
        const int local = row - rows.row_offsets[low];
        if (local < rows.q_len[low]) {
            const SequencePlan plan = call.plan.sequences[low];
            if (plan.chunks > 1) join<T>(call, plan, row, local, head);
            continue;
        }
        constexpr float kZeros[kLaneColumns] = {};
        for (int column = lane * kLaneColumns; column < v_dim; column += 32 * kLaneColumns) {
            store(static_cast<T *>(call.tensors.out) + i * v_dim + column, kZeros);
        }
        if (lane == 0) call.tensors.lse[i] = -INFINITY;
    }
}

}  // namespace

int32_t launch_combine(const AttnCall &call) {
    const int64_t rows = static_cast<int64_t>(call.rows.total_rows) * call.attn.heads;
    const int grid = static_cast<int>(std::min<int64_t>(ceil_div<int64_t>(rows, kWarps), 8 * call.device.multiprocessors));
    if (call.attn.dtype == KDTREE_BFLOAT16) {
        combine_kernel<__nv_bfloat16><<<grid, kThreads, 0, call.stream>>>(call);
    } else {
        combine_kernel<__half><<<grid, kThreads, 0, call.stream>>>(call);
    }
    return launch_status();
}

}  // namespace kdtree
