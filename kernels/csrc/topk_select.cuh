// Selecting the best of many keys within a block, without sorting them: a bound is bisected until few enough keys lie above
// it. A key is 64 bits, larger is better: the logit's ordered bits, then the complement of the token id. Key 0: none.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common.cuh"
#include "ptx.cuh"

namespace kdtree::topk {

constexpr int kMaxK = 1024;
constexpr unsigned kAll = 0xffffffffu;

// Unsigned order of the result = order of the floats; -0.0 equals 0.0.
__device__ inline uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float from_ordered(uint32_t bits) { return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits); }

__device__ inline uint64_t make_key(uint32_t value, uint32_t tie) { return static_cast<uint64_t>(value) << 32 | tie; }
__device__ inline uint32_t key_value(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
__device__ inline uint32_t key_tie(uint64_t key) { return static_cast<uint32_t>(key); }
__device__ inline uint32_t tie_of(int32_t id) { return ~static_cast<uint32_t>(id); }
__device__ inline int32_t id_of(uint32_t tie) { return static_cast<int32_t>(~tie); }

constexpr float kLog2E = 1.4426950408889634f;

// A sum of exponentials relative to its largest term's exponent: sum · exp(peak). Nothing summed: (-FLT_MAX, 0), so that
// differences of peaks are never NaN.
struct Mass {
    float peak, sum;
};

__device__ inline Mass add_warp(Mass mass) {
    const float peak = from_ordered(__reduce_max_sync(kAll, ordered(mass.peak)));
    float sum = mass.sum * exp2_approx((mass.peak - peak) * kLog2E);
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(kAll, sum, offset);
    }
    return {peak, sum};
}

// Block-wide reductions; every thread of the block must take part in each. Two buffers, so that one barrier suffices.
template <int threads>
class Block {
  public:
    using Shared = uint32_t[2][threads / 32];

    __device__ explicit Block(Shared &shared) : shared_(shared) {}

    __device__ int sum(int x) {
        return static_cast<int>(reduce(x, 0, [](uint32_t v) { return __reduce_add_sync(kAll, v); }));
    }
    __device__ uint32_t min(uint32_t x) {
        return reduce(x, kAll, [](uint32_t v) { return __reduce_min_sync(kAll, v); });
    }

  private:
    template <typename ReduceWarp>
    __device__ uint32_t reduce(uint32_t x, uint32_t neutral, ReduceWarp reduce_warp) {
        const int lane = threadIdx.x % 32;
        x = reduce_warp(x);
        if (lane == 0) {
            shared_[turn_][threadIdx.x / 32] = x;
        }
        __syncthreads();
        x = reduce_warp(lane < threads / 32 ? shared_[turn_][lane] : neutral);
        turn_ ^= 1;
        return x;
    }

    Shared &shared_;
    int turn_ = 0;
};

// What is left to search: the bound lies in low … high, `have` keys are at or above low, `above` lie above high.
struct Search {
    uint32_t low, high;
    int have, above;
};

__device__ inline Search join_warp(const Search &mine) {
    return {__reduce_min_sync(kAll, mine.low), __reduce_max_sync(kAll, mine.high), __reduce_add_sync(kAll, mine.have), 0};
}

// Raises `low` until at most `most` keys are at or above it, never leaving fewer than `want`; ends above `most` only at low ==
// high, where equal keys leave no choice. `count(x)`: keys at or above x. have ≥ want on entry.
// Every other step halves the range of floats rather than that of bits: logits crowd in few exponents, but need not.
template <bool floats, typename Count>
__device__ void bisect(Search &search, int want, int most, Count count) {
    for (bool halve_floats = floats; search.low < search.high && search.have > most; halve_floats = floats && !halve_floats) {
        uint32_t middle = search.low + (search.high - search.low) / 2 + 1;
        if (halve_floats) {
            middle = ordered(0.5f * from_ordered(search.low) + 0.5f * from_ordered(search.high));
            middle = max(search.low + 1, min(middle, search.high));
        }
        const int counted = count(middle);
        if (counted >= want) {
            search.low = middle;
            search.have = counted;
        } else {
            search.high = middle - 1;
            search.above = counted;
        }
    }
}

// A key is in where its value is above `value`, or equal to it with a tie at or above `tie`.
struct Cut {
    uint32_t value, tie;
};

// The cut that leaves `want` to `most` keys; values.have is more than that, values.above 0. `at_least(v)`: keys with a value at
// or above v; `tied(v, t)`: keys of value v with a tie at or above t, of which no tie lies outside low_tie … high_tie.
template <typename AtLeast, typename Tied>
__device__ Cut find_cut(Search values, uint32_t low_tie, uint32_t high_tie, int want, int most, AtLeast at_least, Tied tied) {
    bisect<true>(values, want, most, at_least);
    if (values.have <= most) {
        return {values.low, 0};
    }
    Search ties{low_tie, high_tie, values.have - values.above, 0};
    bisect<false>(ties, want - values.above, most - values.above, [&](uint32_t tie) { return tied(values.low, tie); });
    return {values.low, ties.low};
}

}  // namespace kdtree::topk
