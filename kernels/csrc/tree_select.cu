// tree_select: of all trees together the nodes that are worth what they cost; tree_learn: how nodes like them fared. Knows
// trees and a table of chances, not who drafted them and what a second is worth.
//
// Chances are float32 products down each tree, one block a tree. From there on all is in whole units of 2^-24 tokens, so sums
// are exact in any order: one block merges the trees' lists, which are sorted, and looks at every number of nodes.
#include <algorithm>

#include "bitonic.cuh"
#include "overlap.cuh"

namespace kdtree {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxSelectNodes = 1023, kMaxTrees = 1024, kMaxKnots = 256;
constexpr int kGainThreads = 256, kThreads = 1024, kCutThreads = 128;
constexpr int64_t kNever = INT64_MIN;
constexpr float kUnits = 0x1p24f;  // of a token
constexpr double kLargestPrice = 0x1p16, kLargestCost = 0x1p20;

struct Worth {
    int32_t units, wish;  // chance with luck; what nodes are ordered by
};

struct SelectCall {
    kdtree_tree tree;
    int batch, nodes /* N */, max_depth;
    kdtree_acceptance table;
    kdtree_prices prices;
    int run, size;       // places of a tree in the order to come, and of all: powers of two
    Worth *worth;        // [batch, N]
    int32_t *kept;       // [batch]
    float *gains;        // [batch, N]
    int32_t *cells;      // [batch, N]
    int32_t *out_nodes;  // [batch]
    float *expected;     // [batch]
};

__device__ int32_t units_of(double tokens) { return static_cast<int32_t>(rint(tokens * kUnits)); }
__device__ int64_t price_of(double tokens) {
    return static_cast<int64_t>(rint(fmin(fmax(tokens, 0.0), kLargestPrice) * kUnits));
}

__global__ void __launch_bounds__(kGainThreads) gains_kernel(const SelectCall call) {
    __shared__ float gain[kMaxSelectNodes + 1], said[kMaxSelectNodes + 1];
    __shared__ int16_t depth[kMaxSelectNodes + 1], parent[kMaxSelectNodes + 1];
    __shared__ bool straight[kMaxSelectNodes + 1];  // all before it were first choices, and so is it
    __shared__ int32_t wish[kMaxSelectNodes + 1];
    wait_for_previous();
    let_next_begin();
    const int tree = blockIdx.x, thread = threadIdx.x;
    const int64_t first = static_cast<int64_t>(tree) * (call.nodes + 1), row = static_cast<int64_t>(tree) * call.nodes;
    const int count = call.tree.n_nodes[tree];
    for (int node = 1 + thread; node < count; node += kGainThreads) {
        const int above = call.tree.parent[first + node];
        depth[node] = static_cast<int16_t>(call.tree.depth[first + node]);
        parent[node] = static_cast<int16_t>(above);
        said[node] = call.tree.score[first + node] - call.tree.score[first + above];
        straight[node] = call.tree.first_child[first + above] == node;
    }
    if (thread == 0) {
        gain[0] = 1.0f;
        straight[0] = true;
    }
    __syncthreads();

    const kdtree_acceptance &table = call.table;
    const int bins = table.edges_count + 1;
    const auto chance = [&](int cell, float known) {
        return (table.hits[cell] + table.prior * known) / (table.cases[cell] + table.prior);
    };
    for (int level = 1; level <= call.max_depth; ++level) {
        for (int node = 1 + thread; node < count; node += kGainThreads) {
            if (depth[node] != level) continue;
            const bool before = straight[parent[node]];
            int bin = 0;
            while (bin < table.edges_count && table.edges[bin] < said[node]) ++bin;
            const int overall = (call.prices.kind[tree] * (1 + table.depths) * 2 + before) * bins + bin;
            const int own = overall + min(level, table.depths) * 2 * bins;
            gain[node] = gain[parent[node]] * chance(own, chance(overall, expf(said[node])));
            straight[node] = before && straight[node];
            call.cells[row + node - 1] = own;
        }
        __syncthreads();
    }

    const float luck = call.prices.luck[tree];
    for (int node = 1 + thread; node <= call.nodes; node += kGainThreads) {
        const bool is_node = node < count;
        call.gains[row + node - 1] = is_node ? gain[node] : 0.0f;
        if (!is_node) call.cells[row + node - 1] = -1;
        wish[node] = is_node ? units_of(fminf(gain[node] * luck, 1.0f)) : INT32_MAX;
    }
    __syncthreads();
    const int64_t price = price_of(call.prices.price[tree]);
    if (thread >= 32) return;
    int32_t least = INT32_MAX;  // by one warp: the least of all before
    for (int begin = 1; begin <= call.nodes; begin += 32) {
        const int node = begin + thread;
        const int32_t units = node <= call.nodes ? wish[node] : INT32_MAX;
        int32_t mine = units;
        for (int step = 1; step < 32; step *= 2) {
            const int32_t other = __shfl_up_sync(kAllLanes, mine, step);
            mine = min(mine, other);  // a lane without one before it gets its own
        }
        mine = min(mine, least);
        least = __shfl_sync(kAllLanes, mine, 31);
        const int64_t net = max(static_cast<int64_t>(mine) - price, static_cast<int64_t>(INT32_MIN));
        if (node < count) call.worth[row + node - 1] = {units, static_cast<int32_t>(net)};
    }
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
        return cost_[before] + share - (rise % run < 0);
    }

  private:
    const int32_t *at_;
    const int64_t *cost_;
    int knots_;
};

struct Best {
    int64_t net;
    int nodes;
};

__device__ Best better(const Best &a, const Best &b) { return a.net > b.net || (a.net == b.net && a.nodes < b.nodes) ? a : b; }

__global__ void __launch_bounds__(kThreads, 1) select_kernel(const SelectCall call) {
    KDTREE_DYNAMIC_SHARED(16, char, memory);
    __shared__ int64_t sums[kThreads / 32], cost[kMaxKnots];
    __shared__ Best bests[kThreads / 32];
    __shared__ int32_t at[kMaxKnots];
    uint64_t *const keys = reinterpret_cast<uint64_t *>(memory);  // [size] wish, then ~place; 0: none
    int64_t *const prices = reinterpret_cast<int64_t *>(keys + call.size);
    unsigned long long *const expected = reinterpret_cast<unsigned long long *>(prices + call.batch);
    int32_t *const counts = reinterpret_cast<int32_t *>(expected + call.batch), *const rooms = counts + call.batch;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    wait_for_previous();
    let_next_begin();
    for (int i = thread; i < call.prices.knots; i += kThreads) {
        at[i] = call.prices.at[i];
        cost[i] = static_cast<int64_t>(rint(fmin(fmax(call.prices.cost[i], -kLargestCost), kLargestCost) * kUnits));
    }
    for (int tree = thread; tree < call.batch; tree += kThreads) {
        const double price = call.prices.price[tree];
        prices[tree] = price < 0 ? kNever : price_of(price);
        rooms[tree] = min(call.tree.n_nodes[tree] - 1, max(call.prices.most[tree], 0));
        counts[tree] = price < 0 ? rooms[tree] : 0;
        expected[tree] = 0;
    }
    __syncthreads();
    // Each tree's nodes are in order already: a sorted run, the odd ones backwards, as the merges want them.
    for (int i = thread; i < call.size; i += kThreads) {
        const int tree = i / call.run, node = tree % 2 ? call.run - 1 - i % call.run : i % call.run;
        uint64_t key = 0;
        if (tree < call.batch && node < rooms[tree]) {
            const int place = tree * call.nodes + node;
            const Worth worth = call.worth[place];
            if (prices[tree] == kNever) {
                atomicAdd(&expected[tree], static_cast<unsigned long long>(worth.units));
            } else {
                key = static_cast<uint64_t>(static_cast<uint32_t>(worth.wish) ^ 0x80000000u) << 32 |
                      ~static_cast<uint32_t>(place);
            }
        }
        keys[i] = key;
    }
    __syncthreads();
    merge_runs<kThreads>(keys, call.run, call.size);

    const auto node_of = [&](uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); };
    const auto units = [&](int place) { return call.worth[place].units; };
    const int share = ceil_div(call.size, kThreads), begin = thread * share, end = min(begin + share, call.size);
    int64_t mine = 0;
    for (int i = begin; i < end && keys[i]; ++i) mine += units(node_of(keys[i])) - prices[node_of(keys[i]) / call.nodes];
    int64_t through = mine;
    for (int step = 1; step < 32; step *= 2) {
        const int64_t before = __shfl_up_sync(kAllLanes, through, step);
        if (lane >= step) through += before;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    int64_t net = through - mine;
    for (int i = 0; i < warp; ++i) net += sums[i];

    const CostCurve curve(at, cost, call.prices.knots);
    Best best{thread ? kNever : -curve(0), 0};
    for (int i = begin; i < end && keys[i]; ++i) {
        net += units(node_of(keys[i])) - prices[node_of(keys[i]) / call.nodes];
        best = better(best, {net - curve(i + 1), i + 1});
    }
    for (int step = 16; step > 0; step /= 2) {
        best = better(best, {__shfl_xor_sync(kAllLanes, best.net, step), __shfl_xor_sync(kAllLanes, best.nodes, step)});
    }
    if (lane == 0) bests[warp] = best;
    __syncthreads();
    for (int i = 0; i < kThreads / 32; ++i) best = better(best, bests[i]);
    for (int i = thread; i < best.nodes; i += kThreads) {
        const int place = node_of(keys[i]);
        atomicAdd(&counts[place / call.nodes], 1);
        atomicAdd(&expected[place / call.nodes], static_cast<unsigned long long>(units(place)));
    }
    __syncthreads();
    for (int tree = thread; tree < call.batch; tree += kThreads) {
        call.kept[tree] = call.out_nodes[tree] = counts[tree];
        call.expected[tree] = static_cast<float>(static_cast<double>(expected[tree]) / kUnits);
    }
}

__global__ void __launch_bounds__(kCutThreads) cut_kernel(const SelectCall call) {
    wait_for_previous();
    let_next_begin();
    const int kept = call.kept[blockIdx.x];
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (call.nodes + 1);
    for (int node = threadIdx.x; node <= call.nodes; node += kCutThreads) {
        for (int32_t *links : {call.tree.first_child, call.tree.next_sibling}) {
            if (links[first + node] > kept) links[first + node] = -1;
        }
    }
    if (threadIdx.x == 0) call.tree.n_nodes[blockIdx.x] = kept + 1;
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

int power_of_two(int least) {
    int found = 1;
    while (found < least) found *= 2;
    return found;
}

int32_t check(const kdtree_acceptance *table, int32_t batch, int32_t nodes) {
    if (!table || batch < 0 || nodes < 1) return KDTREE_BAD_ARGUMENT;
    if (table->kinds < 1 || table->depths < 1 || table->edges_count < 0) return KDTREE_BAD_ARGUMENT;
    if (!table->cases || !table->hits || (table->edges_count && !table->edges)) return KDTREE_BAD_ARGUMENT;
    return batch > kMaxTrees || nodes > kMaxSelectNodes + 1 ? KDTREE_UNSUPPORTED_SHAPE : KDTREE_OK;
}

}  // namespace
}  // namespace kdtree

extern "C" {

int32_t kdtree_tree_select_workspace(int32_t batch, int32_t nodes, size_t *bytes) {
    if (batch < 0 || nodes < 1 || !bytes) return KDTREE_BAD_ARGUMENT;
    *bytes = static_cast<size_t>(batch) * (sizeof(kdtree::Worth) * (nodes - 1) + sizeof(int32_t));
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
    if (!aligned(workspace, 8)) return KDTREE_MISALIGNED;
    const int most = nodes - 1, run = power_of_two(std::max(most, 1));
    Worth *const worth = static_cast<Worth *>(workspace);
    const SelectCall call{*tree,  batch,
                          most,   max_depth,
                          *table, *prices,
                          run,    run * power_of_two(batch),
                          worth,  reinterpret_cast<int32_t *>(worth + int64_t{batch} * most),
                          gains,  cells,
                          kept,   expected};
    const int64_t bytes = int64_t{call.size} * sizeof(uint64_t) + int64_t{batch} * (8 + 8 + 4 + 4);
    Device device;
    KDTREE_TRY(current_device(&device));
    constexpr int64_t kStatic = 8 << 10;
    if (bytes + kStatic > device.shared_bytes) return KDTREE_UNSUPPORTED_SHAPE;
    KDTREE_TRY(
        from_cuda(cudaFuncSetAttribute(select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes))));
    KDTREE_TRY(enqueue_overlapped(gains_kernel, batch, kGainThreads, stream, call));
    KDTREE_TRY(enqueue(select_kernel, 1, kThreads, bytes, stream, call));
    return enqueue_overlapped(cut_kernel, batch, kCutThreads, stream, call);
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
    return enqueue_overlapped(learn_kernel, 1, kThreads, stream, call);
}

}  // extern "C"
