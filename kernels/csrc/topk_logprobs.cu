// topk_logprobs and its split over ranks: checks and launches. What runs on the device: topk_scan.cuh, topk_merge.cuh.
#include <climits>

#include "topk_merge.cuh"
#include "topk_scan.cuh"

namespace kdtree {
namespace {

using namespace topk;

int element_bytes(int32_t dtype) { return dtype == KDTREE_FLOAT32 ? 4 : 2; }

int32_t check(const kdtree_topk_input *in) {
    if (!in || in->rows < 0 || in->vocab < 0 || in->k < 0 || in->row_stride < 0 || in->first_id < 0) {
        return KDTREE_BAD_ARGUMENT;
    }
    if (in->dtype != KDTREE_FLOAT32 && in->dtype != KDTREE_BFLOAT16 && in->dtype != KDTREE_FLOAT16) {
        return KDTREE_BAD_ARGUMENT;
    }
    return in->k > kMaxK ? KDTREE_UNSUPPORTED_SHAPE : KDTREE_OK;
}

// How the rows are cut; the same for a row alone as for a row among others, so that its bits are.
struct Layout {
    int chunks, slots;
    int64_t blocks, last_column;
    size_t key_bytes, mass_bytes;

    // `aligned_rows`: every row starts at a 16-byte boundary; else it may begin anywhere in the first vector of its first
    // chunk.
    Layout(const kdtree_topk_input &in, bool aligned_rows) {
        const int element = element_bytes(in.dtype);
        const int64_t chunk = kChunkBytes / element, skew = aligned_rows ? 0 : 16 / element - 1;
        chunks = in.vocab ? static_cast<int>(ceil_div(in.vocab + skew, chunk)) : 0;
        slots = ceil_div(in.k + in.k / 2, 32) * 32;
        last_column = in.first_id + chunks * chunk;
        blocks = static_cast<int64_t>(in.rows) * chunks;
        key_bytes = ceil_div<size_t>(blocks * slots * sizeof(uint64_t), 256) * 256;
        mass_bytes = blocks * sizeof(Mass);
    }
    size_t bytes() const { return key_bytes + mass_bytes; }
    bool fits() const { return last_column < INT_MAX && chunks <= 65535 && static_cast<int64_t>(chunks) * slots <= INT_MAX; }
};

template <typename Source>
int32_t launch_merge(const Source &source, const Best &out, int rows, kdtree_stream stream) {
    int sorted_size = 32;
    while (sorted_size < out.k + out.k / 4) {
        sorted_size *= 2;
    }
    return enqueue(merge<Source>, rows, kMergeThreads, 0, stream, source, out, sorted_size);
}

int32_t run(const kdtree_topk_input &in, const Best &out, void *workspace, size_t workspace_bytes, kdtree_stream stream) {
    const int element = element_bytes(in.dtype);
    const Layout layout(in, aligned(in.logits, 16) && in.row_stride * element % 16 == 0);
    const bool wanted = in.rows && (in.k || out.lse);
    if (!layout.fits()) {
        return KDTREE_UNSUPPORTED_SHAPE;
    }
    if (!wanted) {
        return KDTREE_OK;
    }
    if ((in.k && (!out.values || !out.ids)) || (layout.blocks && (!in.logits || !workspace))) {
        return KDTREE_BAD_ARGUMENT;
    }
    if (workspace_bytes < layout.bytes()) {
        return KDTREE_WORKSPACE_TOO_SMALL;
    }
    if (!aligned(in.logits, element) || !aligned(workspace, 256)) {
        return KDTREE_MISALIGNED;
    }
    auto *keys = static_cast<uint64_t *>(workspace);
    auto *masses = reinterpret_cast<Mass *>(static_cast<char *>(workspace) + layout.key_bytes);
    if (layout.blocks) {
        const Rows rows{in.logits, in.row_stride, in.vocab, in.first_id};
        auto *kernel = in.dtype == KDTREE_FLOAT32    ? scan<KDTREE_FLOAT32>
                       : in.dtype == KDTREE_BFLOAT16 ? scan<KDTREE_BFLOAT16>
                                                     : scan<KDTREE_FLOAT16>;
        const dim3 grid(in.rows, layout.chunks);
        const size_t shared_bytes = scan_shared_bytes(layout.slots);
        KDTREE_TRY(enqueue(kernel, grid, kScanThreads, shared_bytes, stream, rows, in.k, layout.slots, keys, masses));
    }
    const Chunks source{keys, masses, layout.chunks, layout.slots};
    return launch_merge(source, out, in.rows, stream);
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" {

int32_t kdtree_topk_logprobs_workspace(const kdtree_topk_input *in, size_t *bytes) {
    KDTREE_TRY(check(in));
    if (!bytes) {
        return KDTREE_BAD_ARGUMENT;
    }
    const Layout layout(*in, false);
    *bytes = layout.bytes();
    return layout.fits() ? KDTREE_OK : KDTREE_UNSUPPORTED_SHAPE;
}

int32_t kdtree_topk_logprobs(const kdtree_topk_input *in, float *logprobs, int32_t *ids, void *workspace,
                             size_t workspace_bytes, kdtree_stream stream) {
    KDTREE_TRY(check(in));
    return run(*in, {logprobs, ids, nullptr, in->k}, workspace, workspace_bytes, stream);
}

int32_t kdtree_topk_partial(const kdtree_topk_input *in, float *values, int32_t *ids, float *lse, void *workspace,
                            size_t workspace_bytes, kdtree_stream stream) {
    KDTREE_TRY(check(in));
    if (!lse && in->rows) {
        return KDTREE_BAD_ARGUMENT;
    }
    return run(*in, {values, ids, lse, in->k}, workspace, workspace_bytes, stream);
}

int32_t kdtree_topk_merge(const float *values, const int32_t *ids, const float *lse, int32_t parts, int32_t rows, int32_t k,
                          float *logprobs, int32_t *merged_ids, kdtree_stream stream) {
    if (parts < 0 || rows < 0 || k < 0) {
        return KDTREE_BAD_ARGUMENT;
    }
    if (k > kMaxK || static_cast<int64_t>(parts) * k > INT_MAX) {
        return KDTREE_UNSUPPORTED_SHAPE;
    }
    if (rows == 0 || k == 0) {
        return KDTREE_OK;
    }
    if (!logprobs || !merged_ids || (parts && (!values || !ids || !lse))) {
        return KDTREE_BAD_ARGUMENT;
    }
    const Ranks source{values, ids, lse, parts, rows, k};
    return launch_merge(source, {logprobs, merged_ids, nullptr, k}, rows, stream);
}

}  // extern "C"
