// What the methods for large trees share: one CTA's working memory. Knows no method.
//
// Nodes are numbered as they are found ("found index", 0 is the root) until their order is known.
#pragma once

#include "tree_build.cuh"

namespace kdtree {

constexpr int kBins = 64;        // of cost, in the count that finds the cut-off
constexpr int kBeyond = kBins;   // a quantised cost that is out of reach
constexpr float kSlack = 2e-5f;  // relative, of costs; scores are sums of rounded steps

struct Found {
    float score;
    uint32_t links;  // parent's found index << 17 | rank << 7 | depth; another thing in tree_build_frontier.cuh

    __device__ static uint32_t link(int parent, int rank, int depth) { return parent << 17 | rank << 7 | depth; }
    __device__ int parent() const { return links >> 17; }
    __device__ int rank() const { return links >> 7 & 0x3ff; }
    __device__ int depth() const { return links & 0x7f; }
};

template <int kThreads>
struct alignas(16) Work {
    static constexpr int kCapacity = 2 * kThreads;  // nodes that may be found
    Found found[kCapacity];
    Answer<kThreads> answer;
    uint64_t key[kCapacity];    // by place
    uint16_t order[kCapacity];  // found index, by place
    uint16_t node[kCapacity];   // node index, by found index; 0: not in the answer, or the root
    uint32_t table[kThreads];   // histogram
    int count[kMaxLevels];      // candidates of each row
    int made[kMaxLevels];       // nodes found at each depth
    int shift[kMaxLevels];      // cost of the best path of each depth, in bins
    int totals[32];             // one per warp
    int reach;                  // depths whose best path is within reach
    float cutoff;
    bool everything;  // all nodes that exist fit
};

// Behind it in shared memory.
struct Costs {
    uint8_t *quantised;  // [levels, quantised_stride] above the row's best, in bins, rounded up; kBeyond: out of reach
    int *paths;          // [levels + 1, 2 × kBins] paths by cost; kBins zeros in front, so that any cost can be subtracted
};

#ifdef __CUDACC__
// Buckets by cost, of which the greatest is `reach`. Most nodes lie near that, and the fourth power spreads them.
template <int kThreads>
struct Buckets {
    float reach, scale;

    __device__ explicit Buckets(float reach) : reach(reach), scale(reach > 0 && reach <= FLT_MAX ? 1 / reach : 0) {}
    __device__ int of(float score) const {
        const float share = fmaxf(-score * scale, 0), square = share * share;
        return min(static_cast<int>(square * square * kThreads), kThreads - 1);
    }
    __device__ float last_cost(int bucket) const { return reach * sqrtf(sqrtf((bucket + 1) * (1.0f / kThreads))); }
};

// Replaces each entry of work.table by the sum of those up to it.
template <int kThreads>
__device__ __forceinline__ void scan_table(Work<kThreads> &work) {
    int through = work.table[threadIdx.x];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(kFullWarp, through, step);
        if (lane_id() >= step) through += before;
    }
    if (lane_id() == 31) work.totals[warp_id()] = through;
    __syncthreads();
    through += __reduce_add_sync(kFullWarp, lane_id() < warp_id() ? work.totals[lane_id()] : 0);
    work.table[threadIdx.x] = through;
    __syncthreads();
}
#endif

inline __host__ __device__ int quantised_stride(const BuildSizes &sizes) { return (sizes.width + 3) / 4 * 4; }

}  // namespace kdtree
