// tree_accept: walks each draft tree along the target's own tokens. Knows the links of a tree, not how it was built.
//
// One CTA per tree. All nodes look for their parents at the same time, in jumps over ever more siblings, and the one
// whose token a parent wants tells it. So the walk itself is one load per step, and a list of children costs the
// logarithm of its length.
#include "overlap.cuh"

namespace kdtree {
namespace {

constexpr int kMaxNodes = 1024;
constexpr int kSmall = 512;  // nodes; above, threads do more each, because barriers of many warps are slow
constexpr int kNone = -1;
constexpr int kNowhere = INT32_MIN;  // in `above`

struct AcceptCall {
    const int32_t *y, *tokens, *first_child, *next_sibling;  // [batch, nodes]
    int nodes, steps;                                        // steps = max_depth + 1, the width of path
    int32_t *path, *n_accepted, *bonus;
};

// A thread has the nodes threadIdx.x, threadIdx.x + blockDim.x, …; `hops` are the jumps between two barriers.
template <int per_thread, int hops>
__global__ void __launch_bounds__(kMaxNodes / per_thread) accept_kernel(const AcceptCall call) {
    // above: a sibling before this node, or ~parent where that is known.
    __shared__ int32_t wanted[kMaxNodes], match[kMaxNodes], above[2][kMaxNodes];
    const int64_t first = static_cast<int64_t>(blockIdx.x) * call.nodes;
    const auto for_each_node = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < per_thread; ++i) visit(i, static_cast<int>(threadIdx.x + i * blockDim.x));
    };
    for_each_node([&](int, int node) {
        match[node] = kNone;
        above[0][node] = kNowhere;
    });
    wait_for_previous();
    let_next_begin();
    int32_t y[per_thread], token[per_thread], child[per_thread], sibling[per_thread];
    for_each_node([&](int i, int node) {
        const bool is_node = node < call.nodes;
        y[i] = is_node ? call.y[first + node] : 0;
        token[i] = is_node ? call.tokens[first + node] : 0;
        child[i] = is_node ? call.first_child[first + node] : kNone;
        sibling[i] = is_node ? call.next_sibling[first + node] : kNone;
    });
    __syncthreads();
    // Links lead to later nodes only. Others are none, so that broken links cannot trap the search.
    const auto follows = [&](int32_t next, int node) { return next > node && next < call.nodes; };
    for_each_node([&](int i, int node) {
        wanted[node] = y[i];
        if (follows(child[i], node)) above[0][child[i]] = ~node;
        if (follows(sibling[i], node)) above[0][sibling[i]] = node;
    });
    __syncthreads();

    int32_t up[per_thread];
    for_each_node([&](int i, int node) { up[i] = above[0][node]; });
    int turn = 0;
    bool again;
    do {
        again = false;
        for (int hop = 0; hop < hops; ++hop) {
            for_each_node([&](int i, int) { up[i] = up[i] >= 0 ? above[turn][up[i]] : up[i]; });
        }
        turn ^= 1;
        for_each_node([&](int i, int node) {
            above[turn][node] = up[i];
            again |= up[i] >= 0;
        });
    } while (__syncthreads_or(again));

    bool wins[per_thread], is_wanted[per_thread];
    for_each_node([&](int i, int) {
        wins[i] = is_wanted[i] = ~up[i] < call.nodes && token[i] == wanted[~up[i]];  // kNowhere is beyond all nodes
    });
    do {  // once, unless siblings have the same token: then the first of them is found
        for_each_node([&](int i, int node) {
            if (wins[i]) match[~up[i]] = node;
        });
        __syncthreads();
        again = false;
        for_each_node([&](int i, int node) {
            wins[i] = is_wanted[i] && node < match[~up[i]];
            again |= wins[i];
        });
    } while (__syncthreads_or(again));

    const int lane = threadIdx.x;
    if (lane >= warpSize) return;
    // Every lane of the first warp walks; lane i keeps steps i, i + 32, … and writes them together.
    int32_t *path = call.path + static_cast<int64_t>(blockIdx.x) * call.steps;
    int32_t current = 0, last = 0, length = 0;
    for (int base = 0; base < call.steps; base += warpSize) {
        int32_t mine = kNone;
        for (int i = 0; i < min(warpSize, call.steps - base) && current != kNone; ++i, ++length) {
            if (i == lane) mine = current;
            last = current;
            current = match[current];
        }
        if (base + lane < call.steps) path[base + lane] = mine;
    }
    if (lane == 0) {
        call.n_accepted[blockIdx.x] = length;
        call.bonus[blockIdx.x] = wanted[last];
    }
}

}  // namespace
}  // namespace kdtree

extern "C" int32_t kdtree_tree_accept(const int32_t *y, const kdtree_tree *tree, int32_t batch, int32_t nodes,
                                      int32_t max_depth, int32_t *path, int32_t *n_accepted, int32_t *bonus,
                                      kdtree_stream stream) {
    using namespace kdtree;
    if (!tree || batch < 0 || nodes < 1 || max_depth < 0 || max_depth == INT32_MAX) return KDTREE_BAD_ARGUMENT;
    if (nodes > kMaxNodes) return KDTREE_UNSUPPORTED_SHAPE;
    if (batch == 0) return KDTREE_OK;
    if (!y || !tree->tokens || !tree->first_child || !tree->next_sibling || !path || !n_accepted || !bonus) {
        return KDTREE_BAD_ARGUMENT;
    }
    const AcceptCall call{y,          tree->tokens, tree->first_child, tree->next_sibling, nodes, max_depth + 1, path,
                          n_accepted, bonus};
    if (nodes <= kSmall) return enqueue_overlapped(accept_kernel<1, 1>, batch, ceil_div(nodes, 32) * 32, 0, stream, call);
    return enqueue_overlapped(accept_kernel<2, 3>, batch, ceil_div(nodes, 64) * 32, 0, stream, call);
}
