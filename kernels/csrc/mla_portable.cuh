// How a CTA of the portable MLA kernel is made: its warps, its barriers, its shared memory, and the walk over its items. Knows
// no arithmetic.
//
// 4 score warps do nothing but S = Q K^T (mla_scores.cuh); 8 value warps turn S into P, 8 rows each, and add P V, 64 columns
// each, to O (mla_values.cuh). So the scores of one unit of slots overlap the softmax and the values of the unit before. No
// warp could hold both a share of O and enough of the queries, part of which stay in registers: shared memory traffic is what
// limits this kernel. Once the scores of a unit are done, only one value warp reads a given 64 columns of it, so that warp
// alone refills them, for the unit after the next, and no barrier says that a stage is free. What does wait: score warps for
// keys (`landed`) and until S of the unit before has been taken (`taken`); value warps for S (`scored`), until all of them have
// used P of the unit before, and for P (both kValues).
//
// Every thread arrives at `scored` and `taken` itself: with bar.arrive, or one lane for its warp, compute-sanitizer's racecheck
// sees no order and reports what is handed over.
#pragma once

#include "attn.cuh"
#include "mma.cuh"

namespace kdtree::mla {

constexpr int kHeadDim = 576, kValueDim = 512;
constexpr int kDepthSteps = kHeadDim / 16;
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kScoreWarps = 4, kValueWarps = 8;
constexpr int kScoreThreads = 32 * kScoreWarps, kValueThreads = 32 * kValueWarps;
constexpr int kThreads = kScoreThreads + kValueThreads;
constexpr int kStages = 2;      // units in shared memory
constexpr int kCopySlots = 32;  // slots whose arrival is announced together
constexpr float kGrowth = 8;    // a row's reference for exp2 moves once its maximum is 2^8 above it: P ≤ 256
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
enum { kScores = 1, kValues };  // hardware barriers, one for the threads of each kind

static_assert(kTileRows == 8 * kValueWarps && kValueDim == 64 * kValueWarps);

// Slots: a unit. RowTiles: m16 tiles of a score warp; its S is (16 RowTiles) x 32. Held: of the 36 k16 steps of the depth,
// those whose queries stay in registers instead of shared memory. InPlace: P takes the place of S, which saves shared memory
// but lets the scores of the next unit be written only when the values are done.
template <int Slots, int RowTiles, int Held, bool InPlace>
struct Config {
    static constexpr int kSlots = Slots, kRowTiles = RowTiles, kHeld = Held;
    static constexpr bool kInPlace = InPlace;
    static constexpr int kSteps = Slots / 16;  // k16 steps of P V
    static constexpr int kWarpRows = 16 * RowTiles;
    static constexpr int kColumnWarps = kScoreWarps / (kTileRows / kWarpRows);  // score warps that share rows
    static constexpr int kWarpSlots = Slots / kColumnWarps;
    static constexpr int kQueryRowBytes = (kDepthSteps - Held) * 32;
    static_assert(kWarpSlots == kCopySlots && kQueryRowBytes % 128 == 0);
};

struct alignas(16) Unit {  // what the value warps need to know of a unit besides S
    int item;
    int first_column;        // of its slots, among the step's own rows; negative: committed
    bool last, end, refill;  // last of its item; last of the CTA; whether there is a unit after the next
};

struct alignas(16) Cursor {
    int unit, end, sequence, kv_len;  // kv_len 0: past the last item
    int index;
};

// n / divisor for 0 ≤ n < 2^31 by a multiplication: a score warp waits for it.
struct Division {
    uint32_t factor, shift;

    explicit Division(uint32_t divisor) : shift(31) {
        while (1ull << (shift - 31) < divisor) ++shift;
        factor = static_cast<uint32_t>(((1ull << shift) + divisor - 1) / divisor);  // too large by less than 1
    }

    __device__ int of(int n) const {
        return static_cast<int>(static_cast<uint64_t>(factor) * static_cast<uint32_t>(n) >> shift);
    }
};

template <class C>
struct Shared {
    alignas(128) uint8_t keys[kStages][C::kSlots * kRowBytes];
    alignas(128) uint8_t queries[kTileRows * C::kQueryRowBytes];
    // S: by lane 4 g + t of a score warp, row g of 8 and columns 2t, 2t+1, 2t+8, 2t+9 of each k16 step.
    float4 scores[kTileRows / 8][C::kSteps][32];
    uint4 probabilities[C::kInPlace ? 1 : kTileRows / 16][C::kInPlace ? 1 : C::kSteps][32];
    float rescale[kTileRows];               // factors of the rows of O
    alignas(8) uint8_t moved[kValueWarps];  // by the warp that made P: whether some factor is not 1
    float inverse[kTileRows];               // of the sums of P, at the end of an item
    Unit unit;
    alignas(16) int slots[kStages][C::kSlots];  // of the cache: the keys to copy next
    Cursor cursors[C::kSlots / 32];
    Barrier landed[kStages][C::kSlots / kCopySlots];
    Barrier scored, taken;

    __device__ uint4 *fragments(int m) {  // A fragments of P, rows 16 m … 16 m + 15: by k16 step and lane
        return C::kInPlace ? reinterpret_cast<uint4 *>(scores[2 * m]) : probabilities[C::kInPlace ? 0 : m][0];
    }
};

struct Parameters {
    kdtree_rows rows;
    kdtree_attn_tensors tensors;
    const PlanHeader *header;
    const Item *items;
    float *partial_out, *partial_lse;
    int heads, slot_bytes;
    Division page;
    float scale_log2;
};

template <class C>
__device__ int first_unit(const Item &item) {
    return item.block_begin * (kBlockSlots / C::kSlots);
}

template <class C>
__device__ int end_unit(const Item &item) {
    return min(item.block_end * (kBlockSlots / C::kSlots), ceil_div(item.kv_len, C::kSlots));
}

// Walks the units of the CTA's items ahead of the scores, to find the slots to copy. One per warp, in shared memory: a score
// warp has no registers left for it.
template <class C>
__device__ void open(Cursor &cursor, const Parameters &p, int index) {
    cursor.kv_len = 0;
    if (index >= p.header->items) return;
    cursor.index = index;
    const Item &item = p.items[index];
    cursor.unit = first_unit<C>(item);
    cursor.end = end_unit<C>(item);
    cursor.sequence = item.sequence;
    cursor.kv_len = item.kv_len;
}

// Where a slot is. Not put together at once: the page's number takes its time to come from memory.
struct Place {
    int page, offset;  // negative: there is no slot

    __device__ int slot(const Parameters &p) const { return offset < 0 ? -1 : page * p.rows.page_size + offset; }
};

// Where the cache has slot `i` of the unit; then on to the next unit. A whole warp. A slot past the sequence's end may be NaN
// and its page may not exist: another slot stands in for it, whose score is masked and whose value times 0 is 0. The first
// ones serve, each once, so that not all CTAs read one row.
template <class C>
__device__ Place take_slot(Cursor &cursor, const Parameters &p, int i) {
    const Cursor at = cursor;
    __syncwarp();
    if (!at.kv_len) return {0, -1};
    int logical = at.unit * C::kSlots + i;
    if (logical >= at.kv_len) logical = (logical - at.kv_len) % at.kv_len;
    const int page = p.page.of(logical);
    const int entry = p.rows.page_table[static_cast<int64_t>(at.sequence) * p.rows.pages + page];
    if (threadIdx.x % 32 == 0) {
        cursor.unit = at.unit + 1;
        if (at.unit + 1 >= at.end) open<C>(cursor, p, at.index + gridDim.x);
    }
    __syncwarp();
    return {entry, logical - page * p.rows.page_size};
}

}  // namespace kdtree::mla
