// tree_accept: walks each draft tree along the target's own tokens. Knows the links of a tree, not how it was built.
//
// One CTA per tree and one thread per node. Every node looks for its match among its children at the same time, so the
// walk itself is one load per step: it costs the longest list of children, not the sum of those on the path.
#include "common.cuh"

namespace kdtree {
namespace {

constexpr int kMaxNodes = 1024;
constexpr int kNone = -1;

struct AcceptCall {
    const int32_t *y, *tokens, *first_child, *next_sibling;  // [batch, nodes]
    int nodes, steps;                                        // steps = max_depth + 1, the width of path
    int32_t *path, *n_accepted, *bonus;
};

__global__ void __launch_bounds__(kMaxNodes) accept_kernel(const AcceptCall call) {
    __shared__ int32_t tokens[kMaxNodes], next_sibling[kMaxNodes], match[kMaxNodes];
    const int node = threadIdx.x;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * call.nodes + node;
    const bool is_node = node < call.nodes;
    int32_t wanted = 0, child = kNone;
    if (is_node) {
        wanted = call.y[at];
        child = call.first_child[at];
        tokens[node] = call.tokens[at];
        next_sibling[node] = call.next_sibling[at];
    }
    __syncthreads();
    // Links lead to later nodes only. One that does not ends its list, so that broken links cannot trap the walk.
    const auto follows = [&](int32_t next, int32_t previous) { return next > previous && next < call.nodes; };
    if (is_node) {
        int32_t previous = node;
        while (follows(child, previous) && tokens[child] != wanted) {
            previous = child;
            child = next_sibling[child];
        }
        match[node] = follows(child, previous) ? child : kNone;
    }
    __syncthreads();

    if (node >= warpSize) return;
    // Every lane of the first warp walks; lane i keeps steps i, i + 32, … and writes them together.
    int32_t *path = call.path + static_cast<int64_t>(blockIdx.x) * call.steps;
    int32_t current = 0, last = 0, length = 0;
    for (int base = 0; base < call.steps; base += warpSize) {
        int32_t mine = kNone;
        for (int i = 0; i < min(warpSize, call.steps - base) && current != kNone; ++i, ++length) {
            if (i == node) mine = current;
            last = current;
            current = match[current];
        }
        if (base + node < call.steps) path[base + node] = mine;
    }
    if (node == 0) {
        call.n_accepted[blockIdx.x] = length;
        call.bonus[blockIdx.x] = call.y[static_cast<int64_t>(blockIdx.x) * call.nodes + last];
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
    return enqueue(accept_kernel, batch, ceil_div(nodes, 32) * 32, 0, stream, call);
}
