// What the stages of tree_build share: sizes, candidates, the answer before it is written. Knows no method.
#pragma once

#include <cfloat>
#include <cmath>

#include "common.cuh"

namespace kdtree {

constexpr int kMaxLevels = 64;
constexpr int kMaxBudget = 1023;
constexpr unsigned kFullWarp = 0xffffffffu;

struct BuildSizes {  // from host arguments alone
    int levels;
    int width;      // candidates kept of each row: no tree of that budget can use more
    int stride;     // between rows of candidates
    int size;       // N + 1
    int words;      // of one ancestor mask
    int pitch;      // words between masks in shared memory
    int tile_rows;  // masks made at a time
    bool vectors;   // masks are written 16 bytes at a time
};

// Finite candidates at the front of each row, in order; NaN, which no comparison lets through, from the row's count on and
// in two more rows. So the candidate after the last and the best of a level that is not there can be read like any other.
struct Candidates {
    float *values;    // [levels + 2, stride]
    int32_t *tokens;  // [levels, stride]
};

constexpr int kSentinels = 2;  // values past a row's end, and rows past the last
constexpr int kLeastStride = 8;

inline __host__ __device__ int64_t candidate_values(const BuildSizes &sizes) {
    return int64_t{sizes.levels + kSentinels} * sizes.stride;
}

template <int kNodes>
struct Answer {  // by node index; entry 0 is the root
    uint16_t parent[kNodes], rank[kNodes];
    uint16_t first_child[kNodes], next_sibling[kNodes];  // 0: none
    uint8_t depth[kNodes];
    float score[kNodes];
};

inline bool complete(const kdtree_tree &out) {
    return out.tokens && out.parent && out.depth && out.position && out.first_child && out.next_sibling && out.ancestors &&
           out.n_nodes && out.score;
}

#ifdef __CUDACC__
__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// Scores are sums from parent to child, each rounded to float32.
__device__ __forceinline__ float child_score(float parent, float logprob) { return __fadd_rn(parent, logprob); }

// They are ≤ 0, so the bits of their magnitude order them: the smallest is the best, a NaN's the last. (The key of a positive
// score, which breaks the promise of the interface, puts its node somewhere.)
constexpr uint32_t kLastKey = 0x7f800000;  // -inf: float32 sums may come to that
constexpr uint32_t kNoKey = 0x7fffffff;
__device__ __forceinline__ uint32_t score_key(float score) { return __float_as_uint(score) & 0x7fffffffu; }
__device__ __forceinline__ float key_score(uint32_t key) { return __uint_as_float(key | 0x80000000u); }
#endif

}  // namespace kdtree
