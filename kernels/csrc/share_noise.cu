// share_noise: candidates ranked by the draw that is to come. Knows candidates, not trees and not the target.
//
// One block a row: each candidate's score is its log-prob plus a share of the Gumbel number that the target will add to its
// own logit; sorted, then normalised. Where log-probs depend on the parent, one block a depth: the candidates' noise is the
// same for all their parents, and a warp takes one parent's row after the other, unsorted. Philox4x32-10: kernels/noise.py says
// how its words become numbers.
#include "overlap.cuh"
#include "topk_merge.cuh"

namespace kdtree {
namespace {

using topk::kMaxK;
constexpr int kThreads = topk::kMergeThreads;
constexpr int kLeastSorted = 32;  // sort_block shares a key among the threads of one warp at most
constexpr uint32_t kMissing = 0;  // below the ordered bits of every float

struct NoiseCall {
    const float *logprobs;  // [batch, levels, k]
    const int32_t *ids;     // [batch, levels, k]
    const int64_t *seed;    // [batch]
    const int32_t *seq_len;
    const float *scale;
    int levels, k, sorted_size;  // sorted_size: a power of two, at least k
    float *out_logprobs;
    int32_t *out_ids;
};

__device__ uint32_t philox_word(uint64_t seed, uint64_t position, uint32_t id) {
    uint32_t c0 = id / 4, c1 = static_cast<uint32_t>(position), c2 = static_cast<uint32_t>(position >> 32), c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int i = 0; i < 10; ++i) {
        const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return id % 4 == 0 ? c0 : id % 4 == 1 ? c1 : id % 4 == 2 ? c2 : c3;
}

// float64: 1 - 2^-25 has no float32.
__device__ float gumbel(uint32_t word) {
    const double u = (static_cast<double>(word >> 8) + 0.5) * 0x1p-24;
    return static_cast<float>(-log(-log(u)));
}

__global__ void __launch_bounds__(kThreads) share_noise_kernel(const NoiseCall call) {
    __shared__ uint64_t keys[kMaxK];
    __shared__ float sums[kThreads / 32];
    wait_for_previous();
    let_next_begin();
    const int64_t first = static_cast<int64_t>(blockIdx.x) * call.k;
    const int sequence = blockIdx.x / call.levels, level = blockIdx.x % call.levels;
    const float scale = call.scale[sequence];
    if (scale <= 0.0f) {
        for (int i = threadIdx.x; i < call.k; i += kThreads) {
            call.out_logprobs[first + i] = call.logprobs[first + i];
            call.out_ids[first + i] = call.ids[first + i];
        }
        return;
    }
    const uint64_t seed = static_cast<uint64_t>(call.seed[sequence]);
    const uint64_t position = static_cast<uint64_t>(static_cast<int64_t>(call.seq_len[sequence]) + 1 + level);
    for (int i = threadIdx.x; i < call.sorted_size; i += kThreads) {
        const float logprob = i < call.k ? call.logprobs[first + i] : -INFINITY;
        uint32_t value = kMissing;
        if (fabsf(logprob) < INFINITY) {
            value = topk::ordered(logprob + scale * gumbel(philox_word(seed, position, call.ids[first + i])));
        }
        keys[i] = topk::make_key(value, topk::tie_of(i));
    }
    __syncthreads();
    topk::sort_block(keys, call.sorted_size, call.sorted_size);

    const auto there = [&](int i) { return topk::key_value(keys[i]) != kMissing; };
    const auto score = [&](int i) { return topk::from_ordered(topk::key_value(keys[i])); };
    const float peak = score(0);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < call.k; i += kThreads) sum += there(i) ? expf(score(i) - peak) : 0.0f;
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(topk::kAll, sum, offset);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (const float part : sums) total += part;
    const float log_total = logf(total);
    for (int i = threadIdx.x; i < call.k; i += kThreads) {
        call.out_logprobs[first + i] = there(i) ? fminf(score(i) - peak - log_total, 0.0f) : -INFINITY;
        call.out_ids[first + i] = there(i) ? call.ids[first + topk::id_of(topk::key_tie(keys[i]))] : -1;
    }
}

constexpr int kMaxPathWidth = 128;

struct PathCall {
    const float *first;        // [batch, k]
    const float *conditional;  // [batch, levels - 1, k, k]
    const int32_t *ids;        // [batch, levels, k]
    const int64_t *seed;       // [batch]
    const int32_t *seq_len;
    const float *scale;
    int levels, k;
    float *out_first, *out_conditional;
};

__global__ void __launch_bounds__(kThreads) path_noise_kernel(const PathCall call) {
    constexpr int kPerLane = kMaxPathWidth / 32;
    __shared__ float noise[kMaxPathWidth];
    wait_for_previous();
    let_next_begin();
    const int sequence = blockIdx.x / call.levels, level = blockIdx.x % call.levels, lane = threadIdx.x % 32;
    const float scale = call.scale[sequence];
    const bool draws = scale > 0.0f;
    const uint64_t seed = static_cast<uint64_t>(call.seed[sequence]);
    const uint64_t position = static_cast<uint64_t>(static_cast<int64_t>(call.seq_len[sequence]) + 1 + level);
    for (int i = threadIdx.x; i < call.k; i += kThreads) {
        const int32_t id = call.ids[static_cast<int64_t>(blockIdx.x) * call.k + i];
        noise[i] = draws ? scale * gumbel(philox_word(seed, position, id)) : 0.0f;
    }
    __syncthreads();

    const int64_t begin = level ? (static_cast<int64_t>(sequence) * (call.levels - 1) + level - 1) * call.k * call.k
                                : static_cast<int64_t>(sequence) * call.k;
    const float *const from = (level ? call.conditional : call.first) + begin;
    float *const to = (level ? call.out_conditional : call.out_first) + begin;
    for (int row = threadIdx.x / 32; row < (level ? call.k : 1); row += kThreads / 32) {
        float score[kPerLane], peak = -FLT_MAX, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int at = 32 * i + lane;
            const float logprob = at < call.k ? from[row * call.k + at] : -INFINITY;
            score[i] = !draws ? logprob : fabsf(logprob) < INFINITY ? logprob + noise[at] : -INFINITY;
            peak = fmaxf(peak, score[i]);
        }
        for (int offset = 16; offset > 0; offset /= 2) peak = fmaxf(peak, __shfl_xor_sync(topk::kAll, peak, offset));
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) sum += expf(score[i] - peak);
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(topk::kAll, sum, offset);
        const float log_sum = logf(sum);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const int at = 32 * i + lane;
            const bool scored = draws && score[i] > -INFINITY;
            if (at < call.k) to[row * call.k + at] = scored ? fminf(score[i] - peak - log_sum, 0.0f) : score[i];
        }
    }
}

}  // namespace
}  // namespace kdtree

extern "C" int32_t kdtree_share_noise(const float *logprobs, const int32_t *ids, const int64_t *seed, const int32_t *seq_len,
                                      const float *scale, int32_t batch, int32_t levels, int32_t k, float *out_logprobs,
                                      int32_t *out_ids, kdtree_stream stream) {
    using namespace kdtree;
    if (batch < 0 || levels < 0 || k < 0) return KDTREE_BAD_ARGUMENT;
    if (k > kMaxK || static_cast<int64_t>(batch) * levels > INT32_MAX) return KDTREE_UNSUPPORTED_SHAPE;
    if (batch == 0 || levels == 0 || k == 0) return KDTREE_OK;
    if (!logprobs || !ids || !seed || !seq_len || !scale || !out_logprobs || !out_ids) return KDTREE_BAD_ARGUMENT;
    int sorted_size = kLeastSorted;
    while (sorted_size < k) sorted_size *= 2;
    const NoiseCall call{logprobs, ids, seed, seq_len, scale, levels, k, sorted_size, out_logprobs, out_ids};
    return enqueue_overlapped(share_noise_kernel, batch * levels, kThreads, 0, stream, call);
}

extern "C" int32_t kdtree_share_noise_path(const float *first, const float *conditional, const int32_t *ids,
                                           const int64_t *seed, const int32_t *seq_len, const float *scale, int32_t batch,
                                           int32_t levels, int32_t k, float *out_first, float *out_conditional,
                                           kdtree_stream stream) {
    using namespace kdtree;
    if (batch < 0 || levels < 0 || k < 0) return KDTREE_BAD_ARGUMENT;
    if (k > kMaxPathWidth || static_cast<int64_t>(batch) * levels > INT32_MAX) return KDTREE_UNSUPPORTED_SHAPE;
    if (batch == 0 || levels == 0 || k == 0) return KDTREE_OK;
    if (!first || !ids || !seed || !seq_len || !scale || !out_first) return KDTREE_BAD_ARGUMENT;
    if (levels > 1 && (!conditional || !out_conditional)) return KDTREE_BAD_ARGUMENT;
    const PathCall call{first, conditional, ids, seed, seq_len, scale, levels, k, out_first, out_conditional};
    return enqueue_overlapped(path_noise_kernel, batch * levels, kThreads, 0, stream, call);
}
