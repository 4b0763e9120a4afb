// tree_select: of all trees together the nodes that are worth what they cost; tree_learn: how nodes like them fared. Knows
// trees and a table of chances, not who drafted them and what a second is worth.
//
// Chances are float32 products down each tree, one block a tree. From there on all is in whole units of 2^-24 tokens, so sums
// are exact in any order. Nothing is sorted: a tree's nodes are in order already, so the nodes before any one are the first few
// of every tree, which a binary search counts, and what they bring is one prefix sum of each.
#include <algorithm>
#include <type_traits>

#include "overlap.cuh"
#include "ptx.cuh"

namespace kdtree {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxSelectNodes = 1023, kMaxTrees = 1024, kMaxKnots = 256;
constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kTogether = 4;            // searches that a lane has under way
constexpr int32_t kNoWish = INT32_MIN;  // of a place whose node does not compete: after all others
constexpr float kUnits = 0x1p24f;       // of a token
constexpr double kLargestPrice = 0x1p16, kLargestCost = 0x1p20;

struct Best {
    int64_t net;
    int nodes;
};

__device__ Best better(const Best &a, const Best &b) { return a.net > b.net || (a.net == b.net && a.nodes < b.nodes) ? a : b; }

__device__ Best best_of_warp(Best mine) {
    for (int step = 16; step > 0; step /= 2) {
        mine = better(mine, {__shfl_xor_sync(kAllLanes, mine.net, step), __shfl_xor_sync(kAllLanes, mine.nodes, step)});
    }
    return mine;
}

// What one kernel leaves to the next, in the workspace.
struct Between {
    int32_t *wishes;  // [batch, N] what nodes are ordered by, plus 1; descending in each tree
    int32_t *turns;   // [batch, N] a node's place in the order of all, from 1; 0: it stays anyway; INT32_MAX: it never does
    int64_t *nets;    // [batch, N] chances with luck less prices, of a tree's nodes up to this one
    int64_t *prices;  // [batch] in units
    int64_t *cost;    // [knots] in units
    int32_t *at;      // [knots]
    Best *bests;      // [blocks]
};

struct SelectCall {
    kdtree_tree tree;
    int batch, nodes /* N */, max_depth;
    kdtree_acceptance table;
    kdtree_prices prices;
    Between between;
    int slices, tile, blocks;  // of rank_kernel: warps for the same 32 nodes; trees in shared memory at a time; in its grid
    float *gains;              // [batch, N]
    int32_t *cells;            // [batch, N]
    int32_t *kept;             // [batch]
    float *expected;           // [batch]
};

__device__ int32_t units_of(double tokens) { return static_cast<int32_t>(rint(tokens * kUnits)); }
__device__ int64_t price_of(double tokens) {
    return static_cast<int64_t>(rint(fmin(fmax(tokens, 0.0), kLargestPrice) * kUnits));
}

// A block a tree and a thread a node. One more block copies the costs, which may be far away.
__global__ void __launch_bounds__(kThreads, 1) gains_kernel(const SelectCall call) {
    __shared__ float gain[kThreads];
    __shared__ bool straight[kThreads];  // all before it were first choices, and so is it
    __shared__ int64_t nets[kWarps];
    __shared__ int32_t leasts[kWarps];
    __shared__ struct {
        double price;
        float luck;
        int kind, most;
    } terms;
    wait_for_previous();
    let_next_begin();
    const int tree = blockIdx.x, node = threadIdx.x, warp = node / 32, lane = node % 32;
    const Between &between = call.between;
    if (tree == call.batch) {
        for (int i = node; i < call.prices.knots; i += blockDim.x) {
            between.at[i] = call.prices.at[i];
            between.cost[i] = static_cast<int64_t>(rint(fmin(fmax(call.prices.cost[i], -kLargestCost), kLargestCost) * kUnits));
        }
        return;
    }
    const int64_t root = static_cast<int64_t>(tree) * (call.nodes + 1), at = root + min(node, call.nodes);
    const kdtree_acceptance &table = call.table;
    const auto edge_at = [&](int i) { return i < table.edges_count ? table.edges[i] : INFINITY; };
    const int count = call.tree.n_nodes[tree], any_depth = call.tree.depth[at], any_parent = call.tree.parent[at];
    const float score = call.tree.score[at];
    float edge = edge_at(lane);  // a warp holds them, so that they are there when `said` is
    if (node == 0) {
        terms = {call.prices.price[tree], call.prices.luck[tree], call.prices.kind[tree], call.prices.most[tree]};
        gain[0] = 1.0f;
        straight[0] = true;
    }
    const bool is_node = node > 0 && node < count;
    const int depth = is_node ? any_depth : 0, above = is_node ? any_parent : 0, level = min(depth, table.depths);
    const bool is_first = call.tree.first_child[root + above] == node;
    const float said = score - call.tree.score[root + above];
    int bin = 0;
    for (int from = 0; from < table.edges_count; from += 32) {
        if (from > 0) edge = edge_at(from + lane);
        for (int i = 0; i < min(32, table.edges_count - from); ++i) bin += __shfl_sync(kAllLanes, edge, i) < said;
    }
    __syncthreads();

    // All that takes long happens for all nodes at once, for either thing that may be true of their parents.
    const auto cell = [&](int level, bool before) {
        return ((terms.kind * (1 + table.depths) + level) * 2 + before) * (table.edges_count + 1) + bin;
    };
    float hits[4], cases[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int own = cell(i / 2 * level, i % 2);
        hits[i] = table.hits[own];
        cases[i] = table.cases[own];
    }
    __syncwarp();  // or the compiler has one wait for the other
    const auto chance = [&](int i, float known) { return (hits[i] + table.prior * known) / (cases[i] + table.prior); };
    const float known = expf(said), otherwise = chance(2, chance(0, known)), if_straight = chance(3, chance(1, known));
    bool before = true;
    float mine = 1.0f;
    for (int now = 1; now <= call.max_depth && __syncthreads_or(depth >= now); ++now) {
        if (depth != now) continue;
        before = straight[above];
        gain[node] = mine = gain[above] * (before ? if_straight : otherwise);
        straight[node] = before && is_first;
    }

    const int64_t price = price_of(terms.price);
    const int32_t units = units_of(fminf(mine * terms.luck, 1.0f));
    int32_t least = is_node ? units : INT32_MAX;  // of the nodes up to this one
    int64_t net = is_node ? units - price : 0;
    for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, least, step);  // a lane without one before it gets its own
        const int64_t sum = __shfl_up_sync(kAllLanes, net, step);
        least = min(least, other);
        if (lane >= step) net += sum;
    }
    if (lane == 31) {
        leasts[warp] = least;
        nets[warp] = net;
    }
    __syncthreads();
    for (int i = 0; i < warp; ++i) {
        least = min(least, leasts[i]);
        net += nets[i];
    }

    if (node == 0) between.prices[tree] = price;
    if (node == 0 || node > call.nodes) return;
    const int64_t place = root - tree + node - 1;
    call.gains[place] = is_node ? mine : 0.0f;
    call.cells[place] = is_node ? cell(level, before) : -1;
    const bool may_stay = is_node && node <= terms.most, competes = may_stay && !(terms.price < 0);
    const int64_t wish = max(least - price, static_cast<int64_t>(INT32_MIN));
    between.wishes[place] = competes ? static_cast<int32_t>(wish + 1) : kNoWish;
    between.nets[place] = net;
    if (!competes) between.turns[place] = may_stay ? 0 : INT32_MAX;
}

// Cost of so many nodes, in units.
class CostCurve {
  public:
    __device__ CostCurve(const int32_t *at, const int64_t *cost, int knots) : at_(at), cost_(cost), knots_(knots) {}

    __device__ int64_t operator()(int nodes) const {
        if (knots_ == 1) return cost_[0];
        int before = 0, after = knots_ - 1;  // the last two where it lies beyond
        while (after - before > 1) {
            const int middle = (before + after) / 2;
            (at_[middle] <= nodes ? before : after) = middle;
        }
        const int64_t rise = (cost_[after] - cost_[before]) * (nodes - at_[before]), run = at_[after] - at_[before];
        const int64_t share = rise / run;
        return cost_[before] + share - (rise - share * run < 0);
    }

  private:
    const int32_t *at_;
    const int64_t *cost_;
    int knots_;
};

// Every node's turn, and the best number of nodes that one of this block's is the last of. A lane a node; so many warps as
// there are slices are for the same 32, each of them for its slice of the trees.
__global__ void __launch_bounds__(kThreads, 1) rank_kernel(const SelectCall call) {
    KDTREE_DYNAMIC_SHARED(16, int32_t, wishes);  // [tile, N]
    __shared__ int64_t cost[kMaxKnots], nets[kWarps][32];
    __shared__ int32_t at[kMaxKnots], turns[kWarps][32];
    __shared__ Best bests[kWarps];
    wait_for_previous();
    let_next_begin();
    const Between &between = call.between;
    const int thread = threadIdx.x, warps = blockDim.x / 32, warp = thread / 32, lane = thread % 32, slice = warp % call.slices;
    const int nodes = call.nodes, places = call.batch * nodes;
    const auto hold = [&](int first) {  // the wishes of this tree and of those after it
        const int32_t *const source = between.wishes + first * nodes;
        const int count = min(call.tile, call.batch - first) * nodes;
        for (int i = 4 * thread; i < count; i += 4 * blockDim.x) cp_async_16(shared_address(wishes + i), source + i, true);
    };
    hold(0);
    for (int i = thread; i < call.prices.knots; i += blockDim.x) {
        at[i] = between.at[i];
        cost[i] = between.cost[i];
    }
    const int place = (blockIdx.x * (warps / call.slices) + warp / call.slices) * 32 + lane;
    int32_t wish = place < places ? between.wishes[place] : kNoWish;
    const bool competes = wish != kNoWish;
    const int own = competes ? place / nodes : -1;
    if (!competes) wish = INT32_MAX;  // nothing is before it: it stands for no nodes
    int half = 1;                     // the largest power of two of nodes
    while (2 * half <= nodes) half *= 2;
    int turn = 0;
    int64_t net = 0;
    for (int first = 0; first * nodes < places; first += call.tile) {
        if (first > 0) {
            __syncthreads();
            hold(first);
        }
        cp_async_wait_all();
        __syncthreads();
        const int trees = min(call.tile, call.batch - first);
        for (int tree = slice * kTogether; tree < trees; tree += call.slices * kTogether) {
            uint32_t begin[kTogether], end[kTogether];  // addresses; of the end of those found to be before
            int32_t bound[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int which = min(tree + i, trees - 1);
                bound[i] = wish - (first + which < own);  // at equal wishes, trees go by their numbers
                begin[i] = end[i] = shared_address(wishes) + 4 * which * nodes;
                if (shared<int32_t>(end[i] + 4 * half - 4) > bound[i]) end[i] += 4 * (nodes + 1 - half);
            }
            for (int step = 4 * half / 2; step > 2; step /= 2) {
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const uint32_t next = end[i] + step;
                    if (shared<int32_t>(next - 4) > bound[i]) end[i] = next;
                }
            }
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int whose = first + tree + i;
                const int found = whose == own ? place - own * nodes + 1 : (end[i] - begin[i]) / 4;
                if (tree + i >= trees || found == 0) continue;
                turn += found;
                net += between.nets[whose * nodes + found - 1];
            }
        }
    }
    if (slice > 0) {
        turns[warp][lane] = turn;
        nets[warp][lane] = net;
    }
    __syncthreads();
    Best best{INT64_MIN, 0};
    if (slice == 0) {
        for (int i = 1; i < call.slices; ++i) {
            turn += turns[warp + i][lane];
            net += nets[warp + i][lane];
        }
        if (competes) between.turns[place] = turn;
        best = best_of_warp({net - CostCurve(at, cost, call.prices.knots)(turn), turn});
    }
    if (lane == 0) bests[warp] = best;
    __syncthreads();
    if (warp > 0) return;
    best = best_of_warp(lane < warps ? bests[lane] : best);
    if (lane == 0) between.bests[blockIdx.x] = best;
}

// A block a tree and a thread a node.
__global__ void __launch_bounds__(kThreads, 1) cut_kernel(const SelectCall call) {
    wait_for_previous();
    let_next_begin();
    const Between &between = call.between;
    const int tree = blockIdx.x, node = threadIdx.x, at_most = min(node, call.nodes);
    const int64_t root = static_cast<int64_t>(tree) * (call.nodes + 1), place = root - tree + node - 1;
    const bool is_node = node > 0 && node <= call.nodes;
    const int32_t turn = is_node ? between.turns[place] : INT32_MAX;
    const int64_t net = is_node ? between.nets[place] : 0, price = between.prices[tree];
    int32_t *const links[] = {call.tree.first_child + root + at_most, call.tree.next_sibling + root + at_most};
    const int32_t to[] = {*links[0], *links[1]};
    Best best{INT64_MIN, 0};
#pragma unroll 4
    for (int i = node % 32; i < call.blocks; i += 32) best = better(best, between.bests[i]);
    best = best_of_warp(best);
    const int kept = __syncthreads_count(turn <= best.nodes);
    if (node > call.nodes) return;
    for (int i = 0; i < 2; ++i) {
        if (to[i] > kept) *links[i] = -1;
    }
    if (node != kept) return;
    call.tree.n_nodes[tree] = kept + 1;
    call.kept[tree] = kept;
    call.expected[tree] = static_cast<float>(static_cast<double>(net + kept * price) / kUnits);
}

struct LearnCall {
    kdtree_acceptance table;
    const int32_t *cells;       // [batch, N]
    const int32_t *parent;      // [batch, N+1]
    const int32_t *kept;        // [batch]
    const int32_t *path;        // [batch, steps]
    const int32_t *n_accepted;  // [batch]
    int batch, nodes, steps;
    float memory;
};

__global__ void __launch_bounds__(kThreads, 1) learn_kernel(const LearnCall call) {
    constexpr int kWords = (kMaxSelectNodes + 1) / 32;
    __shared__ uint32_t taken[kThreads / 32][kWords];  // nodes of the accepted path
    wait_for_previous();
    let_next_begin();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int bins = call.table.edges_count + 1, depth_cells = 2 * bins, levels = 1 + call.table.depths;
    const auto is_taken = [&](int node) { return taken[warp][node / 32] >> node % 32 & 1; };
    for (int tree = warp; tree < call.batch; tree += kThreads / 32) {
        taken[warp][lane] = 0;
        __syncwarp();
        if (lane == 0) {
            const int length = min(call.n_accepted[tree], call.steps);
            for (int i = 0; i < length; ++i) {
                const int node = call.path[static_cast<int64_t>(tree) * call.steps + i];
                taken[warp][node / 32] |= 1u << node % 32;
            }
        }
        __syncwarp();
        const int64_t row = static_cast<int64_t>(tree) * call.nodes;
        for (int node = 1 + lane; node <= min(call.kept[tree], call.nodes); node += 32) {
            const int own = call.cells[row + node - 1];
            if (own < 0 || !is_taken(call.parent[row + tree + node])) continue;
            const int overall = own - own / depth_cells % levels * depth_cells;
            for (const int cell : {own, overall}) {  // of ones, so that their order does not matter
                atomicAdd(&call.table.cases[cell], 1.0f);
                if (is_taken(node)) atomicAdd(&call.table.hits[cell], 1.0f);
            }
        }
        __syncwarp();
    }
    __syncthreads();
    for (int cell = thread; cell < call.table.kinds * levels * depth_cells; cell += kThreads) {
        if (call.table.cases[cell] <= call.memory) continue;
        call.table.cases[cell] *= 0.5f;
        call.table.hits[cell] *= 0.5f;
    }
}

int32_t check(const kdtree_acceptance *table, int32_t batch, int32_t nodes) {
    if (!table || batch < 0 || nodes < 1) return KDTREE_BAD_ARGUMENT;
    if (table->kinds < 1 || table->depths < 1 || table->edges_count < 0) return KDTREE_BAD_ARGUMENT;
    if (!table->cases || !table->hits || (table->edges_count && !table->edges)) return KDTREE_BAD_ARGUMENT;
    return batch > kMaxTrees || nodes > kMaxSelectNodes + 1 ? KDTREE_UNSUPPORTED_SHAPE : KDTREE_OK;
}

// Of 32 places of rank_kernel. At least one of the last stands for no nodes.
int groups_of(int64_t batch, int64_t nodes) { return static_cast<int>(batch * nodes / 32 + 1); }

// Where what is between kernels lies in a workspace that begins so. Returns its bytes.
size_t lay_out(Between &between, uintptr_t begin, int64_t batch, int64_t nodes) {
    uintptr_t end = begin;
    const auto take = [&](auto *&array, int64_t count) {
        array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(end);
        end += ceil_div<size_t>(count * sizeof *array, 16) * 16;  // copies are of 16 bytes
    };
    take(between.wishes, batch * nodes);
    take(between.turns, batch * nodes);
    take(between.nets, batch * nodes);
    take(between.prices, batch);
    take(between.cost, kMaxKnots);
    take(between.at, kMaxKnots);
    take(between.bests, groups_of(batch, nodes));
    return end - begin;
}

}  // namespace
}  // namespace kdtree

extern "C" {

int32_t kdtree_tree_select_workspace(int32_t batch, int32_t nodes, size_t *bytes) {
    if (batch < 0 || nodes < 1 || !bytes) return KDTREE_BAD_ARGUMENT;
    kdtree::Between between;
    *bytes = kdtree::lay_out(between, 0, batch, nodes - 1);
    return KDTREE_OK;
}

int32_t kdtree_tree_select(const kdtree_tree *tree, int32_t batch, int32_t nodes, int32_t max_depth,
                           const kdtree_acceptance *table, const kdtree_prices *prices, float *gains, int32_t *cells,
                           int32_t *kept, float *expected, void *workspace, size_t workspace_bytes, kdtree_stream stream) {
    using namespace kdtree;
    if (!tree || !prices || max_depth < 0 || prices->knots < 1) return KDTREE_BAD_ARGUMENT;
    KDTREE_TRY(check(table, batch, nodes));
    if (batch == 0) return KDTREE_OK;
    if (prices->knots > kMaxKnots) return KDTREE_UNSUPPORTED_SHAPE;
    if (!tree->parent || !tree->depth || !tree->first_child || !tree->next_sibling || !tree->n_nodes || !tree->score ||
        !prices->kind || !prices->luck || !prices->most || !prices->price || !prices->at || !prices->cost ||
        (nodes > 1 && (!gains || !cells)) || !kept || !expected || !workspace) {
        return KDTREE_BAD_ARGUMENT;
    }
    size_t needed;
    KDTREE_TRY(kdtree_tree_select_workspace(batch, nodes, &needed));
    if (workspace_bytes < needed) return KDTREE_WORKSPACE_TOO_SMALL;
    if (!aligned(workspace, 256)) return KDTREE_MISALIGNED;
    Device device;
    KDTREE_TRY(current_device(&device));

    SelectCall call{*tree, batch, nodes - 1, max_depth, *table, *prices};
    call.gains = gains, call.cells = cells, call.kept = kept, call.expected = expected;
    lay_out(call.between, reinterpret_cast<uintptr_t>(workspace), batch, call.nodes);
    const int groups = groups_of(batch, call.nodes), share = ceil_div(groups, device.multiprocessors);
    const int held = ceil_div(share, ceil_div(share, kWarps));  // groups of a block
    call.slices = std::min(ceil_div(batch, kTogether), kWarps / held);
    call.blocks = ceil_div(groups, held);
    constexpr int kStatic = 16 << 10;
    const int fit = (device.shared_bytes - kStatic) / (4 * std::max(call.nodes, 1));
    call.tile = batch <= fit ? batch : fit / 4 * 4;
    const size_t bytes = ceil_div(call.tile * call.nodes, 4) * 16;
    KDTREE_TRY(
        from_cuda(cudaFuncSetAttribute(rank_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))));
    const int tree_threads = ceil_div(nodes, 32) * 32;
    KDTREE_TRY(enqueue_overlapped(gains_kernel, batch + 1, tree_threads, 0, stream, call));
    KDTREE_TRY(enqueue_overlapped(rank_kernel, call.blocks, 32 * held * call.slices, bytes, stream, call));
    return enqueue_overlapped(cut_kernel, batch, tree_threads, 0, stream, call);
}

int32_t kdtree_tree_learn(const kdtree_acceptance *table, const int32_t *cells, const int32_t *parent, const int32_t *kept,
                          const int32_t *path, int32_t max_depth, const int32_t *n_accepted, int32_t batch, int32_t nodes,
                          float memory, kdtree_stream stream) {
    using namespace kdtree;
    KDTREE_TRY(check(table, batch, nodes));
    if (max_depth < 0) return KDTREE_BAD_ARGUMENT;
    if (batch == 0) return KDTREE_OK;
    if ((nodes > 1 && !cells) || !parent || !kept || !path || !n_accepted) return KDTREE_BAD_ARGUMENT;
    const LearnCall call{*table, cells, parent, kept, path, n_accepted, batch, nodes - 1, max_depth + 1, memory};
    return enqueue_overlapped(learn_kernel, 1, kThreads, 0, stream, call);
}

}  // extern "C"
