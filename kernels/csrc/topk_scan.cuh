// First half of topk_logprobs: one block reads one chunk of one row, once, and leaves a superset of the chunk's k best (at most
// `slots` keys, unordered, padded with 0) and the chunk's share of the softmax. The logits wait in shared memory meanwhile.
#pragma once

#include "topk_chunk.cuh"

namespace kdtree::topk {

#if __CUDA_ARCH__ >= 1200
constexpr int kBlocksAtOnce = 3;  // a multiprocessor has room for 1,536 threads
#else
constexpr int kBlocksAtOnce = 4;
#endif

// The k-th best of what `bins` counts, best first, lies in bin `bin`; `before` are in better bins, `through` in those and it.
struct BinOfKth {
    int bin, before, through;
};

constexpr int kBins = 256;

// What the threads of a block tell each other.
struct ScanShared {
    Block<kScanThreads>::Shared block;
    uint16_t listed[kScanThreads];
    Mass mass[kScanThreads / 32];
    Search bests[kScanThreads / 32];
    int bins[kBins];
    BinOfKth found_bin;
    int listed_count, found_count;
};

// Run by one warp; the bins hold k or more.
__device__ inline BinOfKth find_bin(const int (&bins)[kBins], int k) {
    constexpr int kPerLane = kBins / 32;
    const int lane = threadIdx.x % 32;
    int counts[kPerLane], own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        counts[i] = bins[lane * kPerLane + i];
        own += counts[i];
    }
    int through = own;
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(kAll, through, offset);
        through += lane >= offset ? other : 0;
    }
    BinOfKth found{0, through - own, through};
    bool reached = false;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        if (!reached) {
            found = {lane * kPerLane + i, found.before, found.before + counts[i]};
            reached = found.through >= k;
            found.before = reached ? found.before : found.through;
        }
    }
    const int source = __ffs(__ballot_sync(kAll, through >= k)) - 1;
    return {__shfl_sync(kAll, found.bin, source), __shfl_sync(kAll, found.before, source),
            __shfl_sync(kAll, found.through, source)};
}

// Where k threads hold something at or above a bound, so does the chunk hold k keys. So the bound is sought among the threads'
// best, which is cheap, and leaves few keys more than k unless large logits crowd in few threads. `best`: ordered, 0 for none;
// search.have ≥ k. Counts the threads in bins of equal width, then, where the bin in question holds too many, within that bin.
// The bins must be 0 and a barrier have passed.
__device__ inline uint32_t bound_of_bests(uint32_t best, Search search, int k, ScanShared &shared) {
    for (;;) {
        const int shift = max(0, 24 - __clz(search.high - search.low));
        if (best >= search.low && best <= search.high) {
            atomicAdd(&shared.bins[(search.high - best) >> shift], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            const BinOfKth found = find_bin(shared.bins, k - search.above);
            if (threadIdx.x == 0) {
                shared.found_bin = found;
            }
        }
        __syncthreads();
        const BinOfKth found = shared.found_bin;
        search.high -= static_cast<uint32_t>(found.bin) << shift;
        search.low = search.high - min((1u << shift) - 1, search.high - search.low);
        if (shift == 0 || search.above + found.through <= k + k / 8) {
            return search.low;
        }
        search.above += found.before;
        for (int i = threadIdx.x; i < kBins; i += kScanThreads) {
            shared.bins[i] = 0;
        }
        __syncthreads();
    }
}

// Dynamic shared memory: scan_shared_bytes(slots).
template <int dtype>
__global__ void __launch_bounds__(kScanThreads, kBlocksAtOnce) scan(Rows rows, int k, int slots, uint64_t *keys, Mass *masses) {
    using Held = Chunk<dtype>;
    KDTREE_DYNAMIC_SHARED(16, uint4, logits);                                          // [kVectors · kScanThreads]
    uint64_t *found = reinterpret_cast<uint64_t *>(logits + kVectors * kScanThreads);  // [slots]
    __shared__ ScanShared shared;
    Block<kScanThreads> block(shared.block);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
        shared.listed_count = shared.found_count = 0;
    }
    for (int i = thread; i < kBins; i += kScanThreads) {
        shared.bins[i] = 0;
    }

    const Held chunk(rows, blockIdx.x, static_cast<int>(blockIdx.y));
    const int64_t block_index = static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
    uint4 *const mine = logits + thread;
    float best;
    {
        uint4 vectors[kVectors];
        chunk.load(vectors);
        best = Held::largest(vectors);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            mine[v * kScanThreads] = vectors[v];
        }
    }
    Mass mass = Held::mass_of(mine, best);
    if (best == INFINITY || isnan(mass.sum)) {
        best = -INFINITY;
#pragma unroll 1
        for (int v = 0; v < kVectors; ++v) {
            const uint4 vector = Held::sanitised(mine[v * kScanThreads]);
            mine[v * kScanThreads] = vector;
#pragma unroll 1
            for (int i = 0; i < Held::kPerVector; ++i) {
                best = fmaxf(best, Held::value(vector, i));
            }
        }
        mass = Held::mass_of(mine, best);
    }
    const bool any = best > -INFINITY;
    const uint32_t top = any ? ordered(best) : 0;
    mass = add_warp(mass);
    Search bests = join_warp({any ? top : kAll, top, any, 0});
    if (lane == 0) {
        shared.mass[warp] = mass;
        shared.bests[warp] = bests;
    }
    __syncthreads();
    const bool holds_warp = lane < kScanThreads / 32;
    if (warp == 0) {
        mass = add_warp(holds_warp ? shared.mass[lane] : Mass{-FLT_MAX, 0.0f});
        if (lane == 0) {
            masses[block_index] = mass;
        }
    }
    if (k == 0) {
        return;
    }
    bests = join_warp(holds_warp ? shared.bests[lane] : Search{kAll, 0, 0, 0});
    uint32_t low = bests.have >= k ? bound_of_bests(top, bests, k, shared) : 1;

    // Only threads whose best is at or above the bound hold anything that is: the block goes through their logits alone.
    const bool listed = top >= low;
    const unsigned warp_listed = __ballot_sync(kAll, listed);
    if (warp_listed) {
        int at = 0;
        if (lane == 0) {
            at = atomicAdd(&shared.listed_count, __popc(warp_listed));
        }
        at = __shfl_sync(kAll, at, 0) + __popc(warp_listed & ((1u << lane) - 1));
        if (listed) {
            shared.listed[at] = static_cast<uint16_t>(thread);
        }
    }
    __syncthreads();
    auto for_each_vector = [&](auto visit) {
        for (int i = thread; i < shared.listed_count * kVectors; i += kScanThreads) {
            const int n = i % kVectors * kScanThreads + shared.listed[i / kVectors];
            visit(logits[n], rows.first_id + chunk.column + n * Held::kPerVector);
        }
    };
    auto for_each = [&](auto visit) {
        for_each_vector([&](const uint4 &vector, int32_t id) {
#pragma unroll
            for (int i = 0; i < Held::kPerVector; ++i) {
                visit(Held::value(vector, i), tie_of(id + i));
            }
        });
    };
    if (bests.have < k) {  // no bound was sought
        float least = INFINITY;
        for_each([&](float logit, uint32_t) { least = logit > -INFINITY ? fminf(least, logit) : least; });
        low = block.min(ordered(least));
    }

    // Where the bound leaves too many, a higher one is sought among all logits.
    Cut cut{low, 0};
    for (bool narrowed = false;; narrowed = true) {
        const float bound = from_ordered(cut.value);
        const uint64_t lowest = make_key(cut.value, cut.tie);
        for_each_vector([&](const uint4 &vector, int32_t id) {
            unsigned hits = 0;
#pragma unroll
            for (int i = 0; i < Held::kPerVector; ++i) {
                hits |= (Held::value(vector, i) >= bound) << i;
            }
            for (; hits; hits &= hits - 1) {
                const int i = __ffs(hits) - 1;
                const uint64_t key = make_key(ordered(Held::value(vector, i)), tie_of(id + i));
                const int at = key >= lowest ? atomicAdd(&shared.found_count, 1) : slots;
                if (at < slots) {
                    found[at] = key;
                }
            }
        });
        __syncthreads();
        if (shared.found_count <= slots || narrowed) {
            break;
        }
        const int32_t id = rows.first_id + max(chunk.column, 0);
        auto count = [&](auto predicate) {
            int counted = 0;
            for_each([&](float logit, uint32_t tie) { counted += predicate(logit, tie); });
            return block.sum(counted);
        };
        cut = find_cut(
            {low, bests.high, shared.found_count, 0}, tie_of(rows.first_id + rows.vocab), tie_of(rows.first_id), k, slots,
            [&](uint32_t value) { return count([low = from_ordered(value)](float logit, uint32_t) { return logit >= low; }); },
            [&](uint32_t value, uint32_t low) {
                return count(
                    [=, equal = from_ordered(value)](float logit, uint32_t tie) { return logit == equal && tie >= low; });
            });
        __syncthreads();
        if (thread == 0) {
            shared.found_count = 0;
        }
        __syncthreads();
    }
    for (int i = thread; i < slots; i += kScanThreads) {
        keys[block_index * slots + i] = i < shared.found_count ? found[i] : 0;
    }
}

constexpr size_t scan_shared_bytes(int slots) { return kChunkBytes + slots * sizeof(uint64_t); }

}  // namespace kdtree::topk
