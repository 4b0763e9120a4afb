// Grows a small tree best-first, one node at a time, by one warp. Knows nothing of larger ones.
//
// The frontier has one entry per node: its next child. While n nodes are still wanted only its n best entries matter, and up
// to 63 nodes those never exceed a warp: the lanes hold them in order, the best in lane 0, and what is pushed past lane 31
// is not wanted any more. A round takes lane 0's entry and puts two in, the node's own first child and its next sibling; so
// every other entry stays or moves to a lane beside its own. A round costs the chain of instructions from one best entry to
// the next. That is why an entry brings the keys of the two that follow it along, and why neighbours are fetched early.
#pragma once

#include "ptx.cuh"
#include "tree_build.cuh"

namespace kdtree {

constexpr int kSmallNodes = 64;

// Where an entry hangs, as a number that decides between equal scores: depth, then node (of the entry's parent); and
// behind them the entry's rank and its previous sibling.
struct Place {
    static constexpr int kBits = 6;
    static __device__ uint32_t make(uint32_t depth, uint32_t node) { return depth << 3 * kBits | node << 2 * kBits; }
    static __device__ uint32_t depth(uint32_t place) { return place >> 3 * kBits; }
    static __device__ uint32_t node(uint32_t place) { return place >> 2 * kBits & 63; }
    static __device__ uint32_t rank(uint32_t place) { return place >> kBits & 63; }
    static __device__ uint32_t sibling(uint32_t place) { return place & 63; }
    static __device__ uint32_t next(uint32_t place, uint32_t taken) { return ((place | 63) + 1) | taken; }
};

struct Entry {
    uint32_t key, place;
    uint32_t sibling_key, child_key;  // of the entries that follow it

    __device__ bool operator<(const Entry &other) const {
        return (static_cast<uint64_t>(key) << 32 | place) < (static_cast<uint64_t>(other.key) << 32 | other.place);
    }
    template <typename Shuffle>
    __device__ Entry by(Shuffle shuffle) const {
        return {shuffle(key), shuffle(place), shuffle(sibling_key), shuffle(child_key)};
    }
};

__device__ __forceinline__ Entry choose(bool first, const Entry &a, const Entry &b) {
    return {first ? a.key : b.key, first ? a.place : b.place, first ? a.sibling_key : b.sibling_key,
            first ? a.child_key : b.child_key};
}

__device__ __forceinline__ uint32_t key_below(float score, float logprob) { return score_key(child_score(score, logprob)); }

// Opaque, or the compiler finds what follows from it again in every round.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

struct Popped {
    uint32_t place[kSmallNodes];
    float score[kSmallNodes];
};

// Fills `popped` by node; returns the number of nodes besides the root.
__device__ __forceinline__ int pop_all(const float *values, int stride, int budget, Popped &popped) {
    constexpr uint32_t kWord = 4;
    const uint32_t first_row = opaque(shared_address(values)), row_bytes = stride * kWord;
    const uint32_t first_place = opaque(shared_address(popped.place)), first_score = opaque(shared_address(popped.score));
    const uint32_t lane = opaque(lane_id());
    Entry entry{kNoKey, 0, kNoKey, kNoKey};
    if (lane == 0) {
        const uint32_t key = key_below(0, values[0]);
        entry = {key, 0, key_below(0, values[1]), key_below(key_score(key), values[stride])};
    }
    popped.score[0] = 0;  // by every lane, here and below: each reads what it wrote
#pragma unroll 2
    for (int node = 1; node <= budget; ++node) {
        const Entry best = entry.by([](uint32_t x) { return __shfl_sync(kFullWarp, x, 0); });
        const Entry after = entry.by([](uint32_t x) { return __shfl_down_sync(kFullWarp, x, 1); });
        const Entry before = entry.by([](uint32_t x) { return __shfl_up_sync(kFullWarp, x, 1); });

        const uint32_t depth = Place::depth(best.place), row = first_row + depth * row_bytes;
        const float score = key_score(best.key);
        store_shared(first_place + node * kWord, best.place);
        store_shared(first_score + node * kWord, __float_as_uint(score));
        const float parent_score = load_shared(first_score + Place::node(best.place) * kWord);
        const float after_sibling = load_shared(row + (Place::rank(best.place) + 2) * kWord);
        const float below_sibling = load_shared(row + row_bytes), after_child = load_shared(row + row_bytes + kWord);
        const float below_child = load_shared(row + 2 * row_bytes);

        Entry sibling{best.sibling_key, Place::next(best.place, node), 0, 0};
        Entry child{best.child_key, Place::make(depth + 1, node), 0, 0};
        const bool sibling_first = sibling < child;
        const Entry lesser = choose(sibling_first, sibling, child), greater = choose(sibling_first, child, sibling);
        const bool take_after = lane != 31 && after < lesser, take_lesser = entry < lesser;
        const bool stay = entry < greater, take_greater = before < greater;

        // Late, because the loads are under way until here.
        sibling.sibling_key = key_below(parent_score, after_sibling);
        sibling.child_key = key_below(key_score(best.sibling_key), below_sibling);
        child.sibling_key = key_below(score, after_child);
        child.child_key = key_below(key_score(best.child_key), below_child);
        entry = choose(take_after, after,
                       choose(take_lesser, choose(sibling_first, sibling, child),
                              choose(stay, entry, choose(take_greater, choose(sibling_first, child, sibling), before))));
        if (best.key > kLastKey) return node - 1;
    }
    return budget;
}

// By one warp.
__device__ __forceinline__ int grow_best_first(const BuildSizes &sizes, const float *values, int budget,
                                               Answer<kSmallNodes> &answer, Popped &popped) {
    const int lane = lane_id();
    const int made = pop_all(values, sizes.stride, budget, popped);
    __syncwarp();
    for (int node = lane; node < kSmallNodes; node += 32) {
        const uint32_t place = node && node <= made ? popped.place[node] : 0;
        answer.parent[node] = static_cast<uint16_t>(Place::node(place));
        answer.rank[node] = static_cast<uint16_t>(Place::rank(place));
        answer.depth[node] = static_cast<uint8_t>(node ? Place::depth(place) + 1 : 0);
        answer.first_child[node] = answer.next_sibling[node] = 0;
    }
    __syncwarp();
    for (int node = lane + 1; node <= made; node += 32) {
        const uint32_t place = popped.place[node];
        (Place::rank(place) ? answer.next_sibling[Place::sibling(place)] : answer.first_child[Place::node(place)]) =
            static_cast<uint16_t>(node);
    }
    return made;
}

}  // namespace kdtree
