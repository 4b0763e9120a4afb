// Grows a small tree best-first, one node at a time, by one warp. Knows nothing of larger ones.
//
// The frontier has one entry per node: its next child. While n nodes are still wanted only its n best entries matter, and up
// to 63 nodes those never exceed a warp: the lanes hold them in order, the best in lane 0, and what is pushed past lane 31
// is not wanted any more. A round takes lane 0's entry and puts two in, the node's own first child and its next sibling; so
// every other entry stays or moves to a lane beside its own.
//
// A round costs the chain of instructions from one best entry to the next. So lane 0 has the keys of the two that follow its
// entry at hand: the loop computes them from what the round before has loaded, while the lanes exchange entries. What is kept
// by node is lane 0's alone, so that no lane waits for another but to exchange. And every branch is one that the compiler
// knows the whole warp to take; otherwise it checks before each exchange.
#pragma once

#include "ptx.cuh"
#include "tree_build.cuh"

namespace kdtree {

constexpr int kSmallNodes = 64;

// Where an entry hangs, as a number that decides between equal costs: depth, then node (of the entry's parent); and behind
// them the address of its candidate in shared memory, of which a small tree takes less than 64 KB.
struct Place {
    static constexpr uint32_t kDepth = 1 << 24, kNode = 1 << 16;
    static __device__ uint32_t depth(uint32_t place) { return place / kDepth; }
    static __device__ uint32_t node(uint32_t place) { return place / kNode & 0xff; }
    static __device__ uint32_t candidate(uint32_t place) { return place & 0xffff; }
};

struct Entry {
    uint32_t key;  // bits of the cost, which is ≥ 0: in its order
    uint32_t place;

    __device__ bool operator<(const Entry &other) const {
        return (static_cast<uint64_t>(key) << 32 | place) < (static_cast<uint64_t>(other.key) << 32 | other.place);
    }
};

__device__ __forceinline__ Entry choose(bool first, const Entry &a, const Entry &b) {
    return {first ? a.key : b.key, first ? a.place : b.place};
}

struct alignas(8) Follow {  // what enters the frontier when an entry leaves it
    uint32_t sibling_key, child_key;
};

struct alignas(16) Popped {
    Follow follow;   // of the node's entry
    float cost;      // of the node
    uint32_t place;  // which the node itself had as an entry
};

// Costs are scores without their sign, so their sums round in the same way.
__device__ __forceinline__ uint32_t key_below(float cost, float logprob) { return __float_as_uint(__fsub_rn(cost, logprob)); }
__device__ __forceinline__ float key_cost(uint32_t key) { return __uint_as_float(key); }

// Opaque, or the compiler finds what follows from it again in every round.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// By one warp, `count` ≥ 0 nodes, which must exist. Lane 0 fills `popped` by node.
__device__ __forceinline__ void grow_best_first(const BuildSizes &sizes, const float *values, int count, Popped *popped) {
    constexpr uint32_t kWord = sizeof(float);
    const bool leads = lane_id() == 0;
    const uint32_t row_bytes = opaque(sizes.stride * kWord), first_row = opaque(shared_address(values));
    const uint32_t second_row = opaque(first_row + row_bytes), level = opaque(Place::kDepth + row_bytes);
    const uint32_t root = opaque(shared_address(popped)), step = opaque(sizeof(Popped));
    // Lane 0 reads its own; the others, at the same time, what nobody writes.
    const uint32_t my_root = opaque(leads ? root : first_row), my_step = opaque(leads ? step : 0);

    // The round before the first: as if the root had been an entry, which only its first child follows.
    Entry sibling{key_below(0, values[0]), first_row}, child{};
    Entry entry{leads ? sibling.key : kNoKey, first_row};
    uint32_t place = first_row, self = root, child_place = Place::kDepth + second_row;
    float after_sibling = values[1], below_sibling = values[sizes.stride], after_child = 0, below_child = 0;
    float cost = 0, node_cost = 0;  // of lane 0's entry's parent and of the node popped
    bool sibling_first = true, take_after = false;
    Popped next{};
#pragma unroll 4
    for (int node = 1; node <= count; ++node) {
        const uint32_t last_place = place, last = self;
        child_place += Place::kNode;
        self += sizeof(Popped);
        place = __shfl_sync(kFullWarp, entry.place, 0);
        // Lane 31 gets its own entry. It may keep that as a copy, when all lanes are in use: the 32nd best is not wanted then.
        const Entry after{__shfl_down_sync(kFullWarp, entry.key, 1), __shfl_down_sync(kFullWarp, entry.place, 1)};
        const Entry before{__shfl_up_sync(kFullWarp, entry.key, 1), __shfl_up_sync(kFullWarp, entry.place, 1)};

        // The end of the round before, while those are on their way.
        const Follow of_sibling{key_below(cost, after_sibling), key_below(key_cost(sibling.key), below_sibling)};
        const Follow of_child{key_below(node_cost, after_child), key_below(key_cost(child.key), below_child)};
        if (leads) {
            shared<Popped>(last) = {of_child, node_cost, last_place};
            shared<Follow>(root + Place::node(last_place) * step) = of_sibling;
        }
        const Follow of_new = sibling_first ? of_sibling : of_child;
        const Follow follow = take_after ? next.follow : of_new;
        cost = take_after ? next.cost : sibling_first ? cost : node_cost;
        node_cost = key_cost(entry.key);
        sibling.key = __shfl_sync(kFullWarp, follow.sibling_key, 0);
        child.key = __shfl_sync(kFullWarp, follow.child_key, 0);

        const uint32_t depth = Place::depth(place), next_row = second_row + depth * row_bytes;
        after_sibling = load_shared(Place::candidate(place) + 2 * kWord);
        below_sibling = load_shared(next_row);
        after_child = load_shared(next_row + kWord);
        below_child = load_shared(next_row + row_bytes);
        next = shared<Popped>(my_root + Place::node(after.place) * my_step);

        sibling.place = place + kWord;
        child.place = child_place + depth * level;
        sibling_first = sibling.key <= child.key;  // because it is less deep
        const Entry lesser{min(sibling.key, child.key), sibling_first ? sibling.place : child.place};
        const Entry greater{max(sibling.key, child.key), sibling_first ? child.place : sibling.place};
        take_after = after < lesser;
        const bool take_lesser = leads || entry < lesser, stay = entry < greater, take_greater = before < greater;
        entry =
            choose(take_after, after, choose(take_lesser, lesser, choose(stay, entry, choose(take_greater, greater, before))));
    }
    if (leads) {
        shared<Popped>(self).place = place;
        shared<Popped>(self).cost = node_cost;
    }
}

}  // namespace kdtree
