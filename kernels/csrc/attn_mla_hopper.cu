// Attention in the MLA-absorb form on Hopper: key head_dim 576, value its first 512 columns, one key head. Knows items
// (attn.cuh), not how they were cut.
//
// A persistent CTA is three warpgroups around a ring of three KV blocks [64 slots, 576] in shared memory.
// Warpgroup 0 holds the tile's queries in registers, multiplies them with a block's keys and turns the scores into weights P;
// P goes where the block's rotary columns were, which nobody needs once the scores are there. Warpgroups 1 and 2 each hold
// 256 of the output's 512 columns in registers and add P V. P of block i is handed over when the scores of block i + 1 have
// begun, so that both are in the tensor cores' queue at the same time.
// Warpgroup 0 subtracts a reference from the exponents, not the running maximum: it follows the maximum only when that is
// 2^8 ahead, so that the output is hardly ever rescaled. Warp 0 of warpgroup 1 starts the loads, the queries' included, which
// pass through the ring as its entries do.
// Registers decide the shape: ptxas gives wgmma those from 24 on, and wants some left at the end, so the three warpgroups'
// 160 + 160 + 184 hold the output and all queries but the last 80 columns; those stay in shared memory.
#include <algorithm>
#include <climits>
#include <cmath>

#include "attn.cuh"
#include "hopper.cuh"

namespace kdtree {
namespace {

using namespace hopper;

constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kQueryRegisters = 184, kValueRegisters = 160;  // of 3 × 168, the share at launch

constexpr int kHeadDim = 576, kValueDim = 512;
constexpr int kPieceColumns = 64;                  // 128 bytes: a swizzled row
constexpr int kPieces = kHeadDim / kPieceColumns;  // the last holds the rotary columns
constexpr int kPieceBytes = kBlockSlots * 128;
constexpr int kEntryBytes = kPieces * kPieceBytes;
constexpr int kEntries = 3;
constexpr int kParts = 3;  // of an entry, each with its own barrier: scores start on the first
constexpr int kPartPieces = kPieces / kParts;
constexpr int kRotary = kPieces - 1;
constexpr int kSteps = kPieceColumns / 16;        // wgmma steps in a piece
constexpr int kHeldSteps = kRotary * kSteps - 1;  // steps whose queries are in registers: one more would not fit
constexpr float kSlack = 8;                       // how far, in powers of 2, weights may exceed 1

struct Position {  // in the ring
    int entry;
    uint32_t parity;
    __device__ void advance() {
        if (++entry == kEntries) {
            entry = 0;
            parity ^= 1;
        }
    }
    __device__ int previous() const { return entry ? entry - 1 : kEntries - 1; }
};

struct Loading {  // what load_entry does next
    Position at;
    int item, block, block_end;  // block -1: the item's queries
    int kv_len;
    const int32_t *pages;  // of the item's sequence
};

struct Shared {
    uint8_t ring[kEntries][kEntryBytes];
    uint8_t rotary_queries[kPieceBytes];
    uint8_t step_queries[kTileRows * 32];  // those of step kHeldSteps; 8 rows of 16 bytes together
    float inverse[2][kTileRows];           // of the denominators, for odd and even items; see query_warpgroup
    int8_t exponent[kEntries][kTileRows];  // the output so far is to be multiplied by 2^exponent, where `rescale`
    bool rescale[kEntries][4];             // by warp
    uint64_t full[kEntries][kParts];       // the copy engine has written the part
    uint64_t ready[kEntries];              // P lies there
    uint64_t empty[kEntries];              // nobody reads the entry any more
    Loading loading;
    int32_t pages[8];  // page numbers of the block to be loaded next
};
static_assert(sizeof(Shared) <= 227 * 1024);

struct Params {
    kdtree_rows rows;
    Plan plan;
    void *out;
    float *lse, *partial_out, *partial_lse;
    int heads, slots;
    float scale_log2;
    int load_slots;  // slots one load covers: 8, 16, 32 or 64
    int page_size;
    uint32_t page_factor, page_shift;  // slot / page_size = slot * page_factor >> 32 >> page_shift
};

// Read anew at each use: a copy would cost a register that the fragments need.
__device__ __forceinline__ int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
__device__ __forceinline__ int lane() { return thread_index() % 32; }
__device__ __forceinline__ int warp_of_group() { return thread_index() % kWarpgroup / 32; }

extern __shared__ __align__(1024) uint8_t shared_bytes[];
__device__ __forceinline__ Shared &shared() { return *reinterpret_cast<Shared *>(shared_bytes); }

// The row of the tile that the thread's even fragment registers belong to; the odd ones: 8 rows on.
__device__ __forceinline__ int fragment_row() { return warp_of_group() * 16 + lane() / 4; }

// Where the item's rows begin in out and lse, or in the workspace; in rows.
__device__ int64_t first_row(const Params &p, const Item &item) {
    if (item.partial >= 0) return static_cast<int64_t>(item.partial) * kTileRows;
    return item.row_begin + static_cast<int64_t>(p.rows.row_offsets[item.sequence]) * p.heads;
}

// ---- loads ----

// Starts the load of the next entry. One warp has the loads; their state is in shared memory, because that warp's registers
// are full of output.
__device__ __forceinline__ void load_entry(const Params &p, const CUtensorMap &q_map, const CUtensorMap &kv_map) {
    Shared &s = shared();
    Loading next = s.loading;
    const bool queries = next.block < 0;
    const int per_block = kBlockSlots / p.load_slots;  // loads of a piece; a power of 2, at most 8
    int row;                                           // the first one of this lane's loads
    if (queries) {
        if (next.item >= p.plan.header->items) return;
        const Item &item = p.plan.items[next.item];
        row = p.rows.row_offsets[item.sequence] * p.heads + item.row_begin;
        next.block = item.block_begin;
        next.block_end = item.block_end;
        next.kv_len = item.kv_len;
        next.pages = p.rows.page_table + static_cast<int64_t>(item.sequence) * p.rows.pages;
        next.item += gridDim.x;
    } else {
        const int start = next.block * kBlockSlots + lane() % per_block * p.load_slots;
        const int page = __umulhi(start, p.page_factor) >> p.page_shift;
        copy_wait();
        __syncwarp();
        row = start < next.kv_len ? s.pages[lane() % per_block] * p.page_size + start - page * p.page_size
                                  : p.slots;  // out of bounds: zeros
        if (++next.block == next.block_end) next.block = -1;
    }
    const uint32_t full = shared_address(s.full[next.at.entry]), entry = shared_address(s.ring[next.at.entry]);
    barrier_wait(shared_address(&s.empty[next.at.entry]), next.at.parity ^ 1);
    if (lane() < kParts) barrier_expect(full + lane() * 8, kPartPieces * kPieceBytes);
    __syncwarp();
    if (queries || p.load_slots == kBlockSlots) {
        if (lane() < kParts) {
            tma_load(entry + lane() * kPartPieces * kPieceBytes, queries ? q_map : kv_map, full + lane() * 8, 0, row,
                     lane() * kPartPieces);
        }
    } else {
        uint32_t to = entry + lane() * p.load_slots * 128;
        for (int piece = lane() / per_block; piece < kPieces; piece += 32 / per_block, to += 32 * p.load_slots * 128) {
            tma_load(to, kv_map, full + piece / kPartPieces * 8, 0, row, piece);
        }
    }
    next.at.advance();
    if (next.block >= 0 && lane() < per_block) {  // the page numbers of the next block, that they are there when it is its turn
        const int start = next.block * kBlockSlots + lane() * p.load_slots;
        if (start < next.kv_len)
            copy_word(shared_address(&s.pages[lane()]), next.pages + (__umulhi(start, p.page_factor) >> p.page_shift));
    }
    if (lane() == 0) s.loading = next;
    __syncwarp();
}

// ---- scores and softmax ----

// Bit c: whether the row of `node` sees slot first + c of its sequence.
__device__ uint32_t visible_slots(const kdtree_rows &rows, int sequence, int seq_len, int node, int first) {
    const int column = first - seq_len;  // of bit 0 among the step's own rows; negative: a committed slot
    const auto below = [](int count) { return count <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1; };
    if (rows.causal[sequence]) return below(node + 1 - column);
    const uint32_t *bits = rows.ancestors + static_cast<int64_t>(rows.row_offsets[sequence] + node) * rows.ancestor_words;
    const int word = column >> 5;
    const auto at = [&](int i) { return i >= 0 && i < rows.ancestor_words ? bits[i] : 0; };
    const uint32_t own = __funnelshift_r(at(word), at(word + 1), column);
    return below(-column) | (own & below(rows.q_len[sequence] - column));
}

// For a block that reaches past the committed slots: lane 2 r + w has word w of the warp's row r.
__device__ uint32_t find_visible(const Params &p, const Item &item, int block) {
    const int thread = thread_index() % kWarpgroup, row = thread / 2, word = thread % 2;
    const int node = (item.row_begin + min(row, item.row_count - 1)) / p.heads;
    const int seq_len = item.kv_len - p.rows.q_len[item.sequence];
    return visible_slots(p.rows, item.sequence, seq_len, node, block * kBlockSlots + word * 32);
}

__device__ __forceinline__ void mask(float (&scores)[32], uint32_t visible) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {  // two for each of the thread's rows
        const int source = lane() / 4 * 2 + word / 2 * 16 + word % 2;
        const uint32_t bits = __shfl_sync(~0u, visible, source) >> (lane() % 4 * 2);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float &score = scores[word % 2 * 16 + i / 2 * 4 + word / 2 * 2 + i % 2];
            if (!(bits >> (i / 2 * 8 + i % 2) & 1)) score = -INFINITY;
        }
    }
}

// 0 * NaN: what lies past the sequence's end must not meet even a zero weight.
__device__ void clear_tail(uint8_t *entry, int valid) {
    const int count = (kBlockSlots - valid) * 8;
    for (int i = thread_index() % kWarpgroup; i < kRotary * count; i += kWarpgroup) {
        reinterpret_cast<uint4 *>(entry)[(i / count * kBlockSlots + valid) * 8 + i % count] = uint4{};
    }
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Queries of the entry to registers, as A fragments of wgmma; those of the last steps to places of their own.
__device__ __forceinline__ void take_queries(uint32_t (&q)[kHeldSteps][4], int entry) {
    Shared &s = shared();
    const int row = warp_of_group() * 16 + lane() % 16;
    const uint32_t from = shared_address(s.ring[entry]) + row * 128;
#pragma unroll
    for (int step = 0; step < kHeldSteps; ++step) {
        const int chunk = (step % kSteps * 2 + lane() / 16) ^ (row & 7);
        load_matrices(q[step], from + step / kSteps * kPieceBytes + chunk * 16);
    }
    const auto *source = reinterpret_cast<const uint4 *>(s.ring[entry]) + kHeldSteps / kSteps * kPieceBytes / 16;
    const int thread = thread_index() % kWarpgroup, r = thread / 2, half = thread % 2;
    const int chunk = (kHeldSteps % kSteps * 2 + half) ^ (r & 7);
    reinterpret_cast<uint4 *>(s.step_queries)[r / 8 * 16 + half * 8 + r % 8] = source[r * 8 + chunk];
    for (int i = thread; i < kPieceBytes / 16; i += kWarpgroup) {
        reinterpret_cast<uint4 *>(s.rotary_queries)[i] = source[kPieceBytes / 16 + i];
    }
    fence_async_proxy();
    named_barrier(1, kWarpgroup);
}

// Issues scores = queries keysᵀ, in two groups of wgmma: the first is one step, and tells that they have begun.
template <typename T>
__device__ __forceinline__ void multiply_keys(float (&scores)[32], const uint32_t (&q)[kHeldSteps][4], Position at) {
    Shared &s = shared();
    const uint64_t keys = descriptor(shared_address(s.ring[at.entry]));
    hold(scores);
#pragma unroll
    for (int step = 0; step < kPieces * kSteps; ++step) {
        const int piece = step / kSteps;
        if (step % (kPartPieces * kSteps) == 0) {
            barrier_wait(shared_address(&s.full[at.entry][piece / kPartPieces]), at.parity);
            wgmma_fence();
        }
        const uint64_t b = keys + (piece * kPieceBytes + step % kSteps * 32) / 16;
        if (step < kHeldSteps) {
            wgmma_64<T>(scores, q[step], b, step > 0);
        } else if (step == kHeldSteps) {
            wgmma_64<T>(scores, plain_descriptor(shared_address(s.step_queries), 128, 256), b);
        } else {
            wgmma_64<T>(scores, descriptor(shared_address(s.rotary_queries) + step % kSteps * 32), b);
        }
        if (step == 0) wgmma_commit();
    }
    wgmma_commit();
}

template <typename T>
__device__ __forceinline__ void query_warpgroup(const Params &p) {
    Shared &s = shared();
    uint32_t q[kHeldSteps][4];
    float scores[32];
    Position at{0, 0};
    int odd = 0;
    for (int index = blockIdx.x; index < p.plan.header->items; index += gridDim.x, odd ^= 1) {
        const Item &item = p.plan.items[index];
        for (int part = 0; part < kParts; ++part) barrier_wait(shared_address(&s.full[at.entry][part]), at.parity);
        take_queries(q, at.entry);
        if (lane() == 0) barrier_arrive(shared_address(&s.empty[at.entry]), 2);
        at.advance();

        int left = item.block_end - item.block_begin;
        int unmasked = (item.kv_len - p.rows.q_len[item.sequence]) / kBlockSlots - item.block_begin;
        float reference[2] = {-INFINITY, -INFINITY};  // of the exponents, in powers of 2
        float total[2] = {0, 0};                      // of this thread's weights
        do {
            const bool masked = --unmasked < 0;
            const uint32_t visible = masked ? find_visible(p, item, item.block_end - left) : 0;
            multiply_keys<T>(scores, q, at);
            wgmma_wait<1>();
            if (lane() == 0) barrier_arrive(shared_address(&s.ready[at.previous()]));  // nobody waits for the queries'
            wgmma_wait<0>();
            hold(scores);

            if (masked) mask(scores, visible);
            float exponent[2];
            bool moved = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float most = -INFINITY;
#pragma unroll
                for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(scores[4 * i + 2 * half], scores[4 * i + 2 * half + 1]));
                most = quad_max(most) * p.scale_log2;
                exponent[half] = 0;
                if (most > reference[half] + kSlack) {
                    exponent[half] = fmaxf(reference[half] - ceilf(most), -127);
                    reference[half] = ceilf(most);
                    moved = true;
                }
            }
            if (__any_sync(~0u, moved)) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (lane() % 4 == 0) s.exponent[at.entry][fragment_row() + half * 8] = static_cast<int8_t>(exponent[half]);
                    total[half] *= exp2_fast(exponent[half]);
                }
                if (lane() == 0) s.rescale[at.entry][warp_of_group()] = true;
            } else if (lane() == 0) {
                s.rescale[at.entry][warp_of_group()] = false;
            }
            uint32_t weights[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float subtract = reference[i % 2] == -INFINITY ? 0 : reference[i % 2];
                const float a = exp2_fast(fmaf(scores[2 * i], p.scale_log2, -subtract));
                const float b = exp2_fast(fmaf(scores[2 * i + 1], p.scale_log2, -subtract));
                total[i % 2] += a + b;
                weights[i] = pack<T>(a, b);
            }

            named_barrier(1, kWarpgroup);  // every warp's scores are done: nobody reads the rotary keys any more
            const uint32_t target =
                shared_address(s.ring[at.entry]) + kRotary * kPieceBytes + (warp_of_group() * 16 + lane() % 16) * 128;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int chunk = (2 * i + lane() / 16) ^ (lane() & 7);
                store_matrices(target + chunk * 16, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3]);
            }
            if (masked) {
                const int valid = item.kv_len - (item.block_end - left) * kBlockSlots;
                if (valid < kBlockSlots) clear_tail(s.ring[at.entry], max(valid, 0));
            }
            if (left == 1) {
                float *lse = (item.partial < 0 ? p.lse : p.partial_lse) + first_row(p, item);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float sum = quad_sum(total[half]);
                    const int row = fragment_row() + half * 8;
                    // Item n's are read before its last entry, e, is given back; that entry is loaded again as e + kEntries,
                    // and this is entry e + 4 at least. (racecheck follows no order through the copy engine and objects.)
                    static_assert(kEntries <= 4);
                    if (lane() % 4 == 0) {
                        s.inverse[odd][row] = sum > 0 ? 1 / sum : 0;
                        if (row < item.row_count)
                            lse[row] = sum > 0 ? (reference[half] + log2f(sum)) * 0.6931471806f : -INFINITY;
                    }
                }
            }
            fence_async_proxy();
            __syncwarp();
            if (left == 1 && lane() == 0) barrier_arrive(shared_address(&s.ready[at.entry]));
            at.advance();
        } while (--left);
    }
}

// ---- values ----

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }  // -127: 0

template <typename T>
__device__ __forceinline__ void store_rows(const Params &p, const Item &item, const float (&o)[128], int column,
                                           const float (&inverse)[2]) {
    const int64_t place = first_row(p, item) + fragment_row();
    const int rows = item.row_count - fragment_row();
    column += lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half * 8 >= rows) continue;
        const int64_t start = (place + half * 8) * kValueDim + column;
        if (item.partial >= 0) {
            float *out = p.partial_out + start;
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                *reinterpret_cast<float2 *>(out + 8 * i) = {o[4 * i + 2 * half] * inverse[half],
                                                            o[4 * i + 2 * half + 1] * inverse[half]};
            }
        } else {
            T *out = static_cast<T *>(p.out) + start;
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                *reinterpret_cast<uint32_t *>(out + 8 * i) =
                    pack<T>(o[4 * i + 2 * half] * inverse[half], o[4 * i + 2 * half + 1] * inverse[half]);
            }
        }
    }
}

template <typename T, int kHalf>
__device__ __forceinline__ void value_warpgroup(const Params &p, const CUtensorMap &q_map, const CUtensorMap &kv_map) {
    Shared &s = shared();
    constexpr int column = kHalf * (kValueDim / 2);
    const bool loads = kHalf == 0 && warp_of_group() == 0;
    if (loads) {
        for (int i = 0; i < kEntries; ++i) load_entry(p, q_map, kv_map);
        load_entry(p, q_map, kv_map);  // into the first queries' place
    }
    float o[128];
    Position at{0, 0};
    int odd = 0;
    for (int index = blockIdx.x; index < p.plan.header->items; index += gridDim.x, odd ^= 1) {
        int left = p.plan.items[index].block_end - p.plan.items[index].block_begin, add = 0;
        at.advance();  // the queries
        do {
            barrier_wait(shared_address(&s.ready[at.entry]), at.parity);
            if (add && s.rescale[at.entry][warp_of_group()]) {
                const float a = power_of_two(s.exponent[at.entry][fragment_row()]);
                const float b = power_of_two(s.exponent[at.entry][fragment_row() + 8]);
#pragma unroll
                for (int j = 0; j < 128; j += 4) {
                    o[j] *= a;
                    o[j + 1] *= a;
                    o[j + 2] *= b;
                    o[j + 3] *= b;
                }
            }
            const uint32_t entry = shared_address(s.ring[at.entry]);
            const uint64_t weights = descriptor(entry + kRotary * kPieceBytes);
            const uint64_t values = descriptor(entry + column / kPieceColumns * kPieceBytes, kPieceBytes);
            hold(o);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < kBlockSlots / 16; ++step) {
                wgmma_256<T>(o, weights + step * 2, values + step * 16 * 128 / 16, add + step);
            }
            add = 1;
            wgmma_commit();
            wgmma_wait<0>();
            hold(o);
            if (--left == 0) break;
            if (lane() == 0) barrier_arrive(shared_address(&s.empty[at.entry]));
            at.advance();
            if (loads) load_entry(p, q_map, kv_map);
        } while (true);
        const float inverse[2] = {s.inverse[odd][fragment_row()], s.inverse[odd][fragment_row() + 8]};
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared_address(&s.empty[at.entry]));
        at.advance();
        if (loads) {  // two: queries are loaded into a place that no values were read from
            load_entry(p, q_map, kv_map);
            load_entry(p, q_map, kv_map);
        }
        store_rows<T>(p, p.plan.items[index], o, column, inverse);
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    mla_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map,
               const __grid_constant__ Params p) {
    Shared &s = shared();
    if (threadIdx.x == 0) {
        for (int entry = 0; entry < kEntries; ++entry) {
            for (int part = 0; part < kParts; ++part) barrier_init(shared_address(&s.full[entry][part]), 1);
            barrier_init(shared_address(&s.ready[entry]), 4);
            barrier_init(shared_address(&s.empty[entry]), 8);
        }
        s.loading = {{0, 0}, static_cast<int>(blockIdx.x), -1, 0, 0, nullptr};
        barrier_init_fence();
        tma_prefetch(q_map);
        tma_prefetch(kv_map);
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
    if (warpgroup == 0) {
        take_registers<kQueryRegisters>();
        query_warpgroup<T>(p);
    } else if (warpgroup == 1) {
        give_registers<kValueRegisters>();
        value_warpgroup<T, 0>(p, q_map, kv_map);
    } else {
        give_registers<kValueRegisters>();
        value_warpgroup<T, 1>(p, q_map, kv_map);
    }
}

// ---- host ----

// [rows, 576] as pieces of 64 columns: a load is `box_rows` rows of `box_pieces` pieces, one piece after the other.
int32_t encode(CUtensorMap *map, int32_t dtype, const void *base, uint64_t rows, uint64_t stride, uint32_t box_rows,
               uint32_t box_pieces) {
    static const auto function = [] {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
    }();
    if (!function) return from_cuda(cudaErrorNotSupported);
    const cuuint64_t sizes[3] = {kPieceColumns, rows, kPieces}, strides[2] = {stride * 2, kPieceColumns * 2};
    const cuuint32_t box[3] = {kPieceColumns, box_rows, box_pieces}, steps[3] = {1, 1, 1};
    const CUresult result =
        function(map, dtype == KDTREE_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
                 const_cast<void *>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? KDTREE_OK : from_cuda(cudaErrorInvalidValue);
}

template <typename T>
int32_t launch(const AttnCall &call, const CUtensorMap &q_map, const CUtensorMap &kv_map, const Params &params, int grid) {
    KDTREE_TRY(from_cuda(cudaFuncSetAttribute(mla_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared))));
    mla_kernel<T><<<grid, kThreads, sizeof(Shared), call.stream>>>(q_map, kv_map, params);
    return launch_status();
}

}  // namespace

int32_t launch_mla_hopper(const AttnCall &call) {
    const kdtree_attn_tensors &t = call.tensors;
    const int page = call.rows.page_size;
    const int load_slots = page % kBlockSlots == 0 ? kBlockSlots : page;
    if (load_slots != 64 && load_slots != 32 && load_slots != 16 && load_slots != 8) return KDTREE_UNSUPPORTED_SHAPE;
    const int64_t q_rows = static_cast<int64_t>(call.rows.total_rows) * call.attn.heads;
    if (t.slots < 1 || t.slots > INT_MAX || q_rows > INT_MAX || !(call.attn.scale > 0)) return KDTREE_UNSUPPORTED_SHAPE;

    uint32_t page_bits = 0;
    while (page > 1 << page_bits) ++page_bits;
    CUtensorMap q_map, kv_map;
    KDTREE_TRY(encode(&q_map, call.attn.dtype, t.q, q_rows, kHeadDim, kTileRows, kPartPieces));
    KDTREE_TRY(encode(&kv_map, call.attn.dtype, t.k_cache, t.slots, t.k_slot_stride, load_slots,
                      load_slots == kBlockSlots ? kPartPieces : 1));
    const Params params{call.rows,
                        call.plan,
                        t.out,
                        t.lse,
                        call.partial_out,
                        call.partial_lse,
                        call.attn.heads,
                        static_cast<int>(t.slots),
                        call.attn.scale * 1.4426950409f,
                        load_slots,
                        page,
                        static_cast<uint32_t>(((1ull << (31 + page_bits)) + page - 1) / page),
                        page_bits - 1};
    const int64_t most = plan_limits(call.rows, call.attn, call.device).items;
    const int grid = static_cast<int>(std::min<int64_t>(most, attn_workers(call.attn, call.device)));
    return call.attn.dtype == KDTREE_BFLOAT16 ? launch<__nv_bfloat16>(call, q_map, kv_map, params, grid)
                                              : launch<__half>(call, q_map, kv_map, params, grid);
}

}  // namespace kdtree
