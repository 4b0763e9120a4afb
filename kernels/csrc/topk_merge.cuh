// Second half of topk_logprobs: one block joins the candidates of one row, whether they come from the chunks of a scan or from
// the ranks of a split vocabulary, and writes the k best in order.
#pragma once

#include "topk_select.cuh"

namespace kdtree::topk {

constexpr int kMergeThreads = 256;
constexpr int kHeld = 8;         // candidates a thread holds; where a row has more, they are read again at each step
constexpr int kMergeBlocks = 4;  // per multiprocessor
constexpr int kMaxSorted = 2 * kMaxK;

// What `scan` left.
struct Chunks {
    const uint64_t *keys;  // [rows, chunks, slots]
    const Mass *masses;    // [rows, chunks]
    int parts, slots;

    __device__ int candidates() const { return parts * slots; }
    __device__ uint64_t key(int64_t row, int i) const { return keys[row * parts * slots + i]; }
    __device__ Mass mass(int64_t row, int part) const { return masses[row * parts + part]; }
};

// What the ranks' topk_partial left.
struct Ranks {
    const float *values;  // [parts, rows, k]
    const int32_t *ids;   // [parts, rows, k]
    const float *lse;     // [parts, rows]
    int parts, rows, k;

    __device__ int candidates() const { return parts * k; }
    __device__ uint64_t key(int64_t row, int i) const {
        const int64_t at = (static_cast<int64_t>(i / k) * rows + row) * k + i % k;
        const float value = values[at];
        return fabsf(value) < INFINITY ? make_key(ordered(value), tie_of(ids[at])) : 0;
    }
    __device__ Mass mass(int64_t row, int part) const {
        const float log_sum = lse[static_cast<int64_t>(part) * rows + row];
        return log_sum > -INFINITY ? Mass{log_sum, 1.0f} : Mass{-FLT_MAX, 0.0f};
    }
};

// With `lse`, values are the logits themselves; without, log-probs.
struct Best {
    float *values;  // [rows, k]
    int32_t *ids;   // [rows, k]
    float *lse;     // [rows] or null
    int k;
};

// Sorts `count` different keys in descending order; those from there to `size`, a power of two, are 0.
__device__ inline void sort_block(uint64_t *keys, int count, int size) {
    if (size <= kMergeThreads) {  // few: each goes where the number of larger ones says
        const int shares = kMergeThreads / size, share = threadIdx.x & (shares - 1), at = threadIdx.x / shares;
        const uint64_t key = keys[at];
        int rank = 0;
        if (at < count) {
#pragma unroll 8
            for (int i = share; i < count; i += shares) {
                rank += keys[i] > key;
            }
        }
        for (int offset = 1; offset < shares; offset *= 2) {
            rank += __shfl_xor_sync(kAll, rank, offset);
        }
        __syncthreads();
        if (at < count) {
            keys[rank] = key;
        }
    } else {  // bitonic
        for (int run = 2; run <= size; run *= 2) {
            for (int stride = run / 2; stride > 0; stride /= 2) {
                for (int pair = threadIdx.x; pair < size / 2; pair += kMergeThreads) {
                    const int i = 2 * pair - (pair & (stride - 1));
                    const uint64_t a = keys[i], b = keys[i + stride];
                    if ((a < b) == ((i & run) == 0)) {
                        keys[i] = b;
                        keys[i + stride] = a;
                    }
                }
                __syncthreads();
            }
        }
    }
    __syncthreads();
}

struct MergeShared {
    uint64_t sorted[kMaxSorted];
    Block<kMergeThreads>::Shared block;
    Mass mass[kMergeThreads / 32];
    Search values[kMergeThreads / 32];
    int sorted_count;
};

template <typename Source>
__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks) merge(Source source, Best out, int sorted_size) {
    __shared__ MergeShared shared;
    Block<kMergeThreads> block(shared.block);
    const int64_t row = blockIdx.x;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int candidates = source.candidates();
    uint64_t held[kHeld];
    auto hold = [&](int begin) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int at = begin + i * kMergeThreads + thread;
            held[i] = at < candidates ? source.key(row, at) : 0;
        }
    };
    auto for_each = [&](auto visit) {
        for (int begin = 0; begin < candidates; begin += kMergeThreads * kHeld) {
            if (candidates > kMergeThreads * kHeld) {
                hold(begin);
            }
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                visit(held[i]);
            }
        }
    };

    hold(0);
    Mass mass{-FLT_MAX, 0.0f};
    for (int part = thread; part < source.parts; part += kMergeThreads) {
        const Mass other = source.mass(row, part);
        const float peak = fmaxf(mass.peak, other.peak);
        mass = {peak,
                mass.sum * exp2_approx((mass.peak - peak) * kLog2E) + other.sum * exp2_approx((other.peak - peak) * kLog2E)};
    }
    mass = add_warp(mass);
    Search values{kAll, 0, 0, 0};
    for_each([&](uint64_t key) {
        values.low = min(values.low, key ? key_value(key) : kAll);
        values.high = max(values.high, key_value(key));
        values.have += key != 0;
    });
    values = join_warp(values);
    if (lane == 0) {
        shared.mass[warp] = mass;
        shared.values[warp] = values;
    }
    if (thread == 0) {
        shared.sorted_count = 0;
    }
    for (int i = thread; i < sorted_size; i += kMergeThreads) {
        shared.sorted[i] = 0;
    }
    __syncthreads();
    const bool holds_warp = lane < kMergeThreads / 32;
    mass = add_warp(holds_warp ? shared.mass[lane] : Mass{-FLT_MAX, 0.0f});
    values = join_warp(holds_warp ? shared.values[lane] : Search{kAll, 0, 0, 0});

    Cut cut{values.low, 0};
    if (values.have > sorted_size) {
        cut = find_cut(
            values, 0, kAll, out.k, sorted_size,
            [&](uint32_t value) {
                int above = 0;
                for_each([&](uint64_t key) { above += key_value(key) >= value; });
                return block.sum(above);
            },
            [&](uint32_t value, uint32_t tie) {
                int equal = 0;
                for_each([&](uint64_t key) { equal += key_value(key) == value && key_tie(key) >= tie; });
                return block.sum(equal);
            });
    }
    const uint64_t bound = make_key(cut.value, cut.tie);
    for_each([&](uint64_t key) {
        if (key && key >= bound) {
            const int at = atomicAdd(&shared.sorted_count, 1);
            if (at < sorted_size) {  // more only where a caller's ids repeat
                shared.sorted[at] = key;
            }
        }
    });
    __syncthreads();
    sort_block(shared.sorted, min(shared.sorted_count, sorted_size), sorted_size);

    const float log_sum = logf(mass.sum);
    if (out.lse && thread == 0) {
        out.lse[row] = mass.sum > 0.0f ? mass.peak + log_sum : -INFINITY;
    }
    for (int i = thread; i < out.k; i += kMergeThreads) {
        const uint64_t key = shared.sorted[i];
        const float value = from_ordered(key_value(key));
        const int64_t at = row * out.k + i;
        out.values[at] = key == 0 ? -INFINITY : out.lse ? value : (value - mass.peak) - log_sum;
        out.ids[at] = key == 0 ? -1 : id_of(key_tie(key));
    }
}

}  // namespace kdtree::topk
