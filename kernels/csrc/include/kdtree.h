/* Draft-tree operations on NVIDIA GPUs: plain C, no Python, no torch. Shapes, dtypes and a worked example: docs/kernels.md.
 *
 * Every function that takes a stream only enqueues work on it. None throws, prints, exits, allocates device memory,
 * synchronises or touches the default stream; outputs and workspaces belong to the caller; pointers are to device memory
 * unless a comment says host. Launch shapes depend on host arguments alone and what varies is read on the device, so every
 * call can be captured in a CUDA graph and replayed with changed contents. The current device must be the stream's.
 * Arrays are contiguous unless a stride is given. Workspaces and plans must be aligned to 256 bytes; their contents mean
 * nothing between calls, except that a plan is read by later attention calls. */
#ifndef KDTREE_H
#define KDTREE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KDTREE_API __attribute__((visibility("default")))
#else
#define KDTREE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KDTREE_ABI_VERSION 2

/* What every function returns. 100 + n is cudaError n. */
enum {
    KDTREE_OK = 0,
    KDTREE_BAD_ARGUMENT = 1,             /* a null pointer, a negative size */
    KDTREE_UNSUPPORTED_SHAPE = 2,        /* see the support matrix */
    KDTREE_UNSUPPORTED_ARCHITECTURE = 3, /* this device cannot run that kernel */
    KDTREE_WORKSPACE_TOO_SMALL = 4,
    KDTREE_MISALIGNED = 5, /* a pointer or stride is not aligned as its comment says */
    KDTREE_CUDA_ERROR = 100
};

enum { KDTREE_FLOAT32 = 0, KDTREE_BFLOAT16 = 1, KDTREE_FLOAT16 = 2 };

typedef struct CUstream_st *kdtree_stream; /* a cudaStream_t */

KDTREE_API int32_t kdtree_abi_version(void);
KDTREE_API int32_t kdtree_max_qlen(void);                    /* most rows of one tree, root included: 1024 */
KDTREE_API const char *kdtree_status_string(int32_t status); /* host, static */

/* ---- topk_logprobs: log-softmax of each row, then its k best, by (logit descending, token id ascending) ----
 * A logit that is not finite is no candidate and has no share in the softmax; missing candidates: -inf and id -1. */
typedef struct {
    const void *logits; /* [rows, vocab], dtype; row r at logits + r * row_stride elements; aligned to its element */
    int64_t row_stride;
    int32_t dtype, rows, vocab, k;
    int32_t first_id; /* token id of column 0: where the vocabulary is split over ranks */
} kdtree_topk_input;

KDTREE_API int32_t kdtree_topk_logprobs_workspace(const kdtree_topk_input *in, size_t *bytes);
/* logprobs [rows, k] float, ids [rows, k] */
KDTREE_API int32_t kdtree_topk_logprobs(const kdtree_topk_input *in, float *logprobs, int32_t *ids, void *workspace,
                                        size_t workspace_bytes, kdtree_stream stream);
/* The share of one rank. values [rows, k] float: the logits themselves (-inf where missing); ids [rows, k];
 * lse [rows] float: natural log of the sum of exp over the rank's finite logits. Workspace as for topk_logprobs. */
KDTREE_API int32_t kdtree_topk_partial(const kdtree_topk_input *in, float *values, int32_t *ids, float *lse, void *workspace,
                                       size_t workspace_bytes, kdtree_stream stream);
/* Joins the shares of `parts` ranks: values, ids [parts, rows, k], lse [parts, rows] -> logprobs, ids [rows, k]. Equals
 * topk_logprobs of the whole row. */
KDTREE_API int32_t kdtree_topk_merge(const float *values, const int32_t *ids, const float *lse, int32_t parts, int32_t rows,
                                     int32_t k, float *logprobs, int32_t *merged_ids, kdtree_stream stream);

/* ---- share_noise: candidates ranked by the draw that is to come ----
 * score(id) = logprob + scale * Gumbel(seed, position, id), position = seq_len + 1 + level: Philox4x32-10 with counter
 * (id / 4, position low, position high, 0) and the seed as key; of its words number id % 4; u = (its top 24 bits + 1/2) / 2^24,
 * Gumbel = -log(-log u). Out: log-softmax of each row's scores, descending, and their ids; missing candidates -inf and -1.
 * Rows of a sequence whose scale is 0 are copied. logprobs, ids and both outputs [batch, levels, k], k ≤ 1024, outputs in
 * memory of their own; seed, seq_len, scale [batch]. */
KDTREE_API int32_t kdtree_share_noise(const float *logprobs, const int32_t *ids, const int64_t *seed, const int32_t *seq_len,
                                      const float *scale, int32_t batch, int32_t levels, int32_t k, float *out_logprobs,
                                      int32_t *out_ids, kdtree_stream stream);

/* The same for log-probs that depend on the parent, as tree_build_path takes them: first [batch, k], conditional [batch,
 * levels-1, k, k], ids [batch, levels, k], k ≤ 128. Candidates stay where they are; each row is normalised. */
KDTREE_API int32_t kdtree_share_noise_path(const float *first, const float *conditional, const int32_t *ids,
                                           const int64_t *seed, const int32_t *seq_len, const float *scale, int32_t batch,
                                           int32_t levels, int32_t k, float *out_first, float *out_conditional,
                                           kdtree_stream stream);

/* ---- tree_build: the `budget` most probable prefixes, best first ---- */
typedef struct {
    const float *logprobs;    /* [batch, levels, k], each row descending; a value that is not finite is no candidate */
    const int32_t *ids;       /* [batch, levels, k] */
    const int32_t *root;      /* [batch] token of node 0 */
    const int32_t *seq_len;   /* [batch] position of node 0 */
    const int32_t *budget;    /* [batch] nodes wanted besides the root; read as 0 … max_budget */
    int32_t batch, levels, k; /* levels ≤ 64 */
    int32_t max_budget;       /* N ≤ 1023 */
} kdtree_build_input;

typedef struct {
    int32_t *tokens, *parent, *depth, *position; /* [batch, N+1]; padding: 0, -1, 0, 0 */
    int32_t *first_child, *next_sibling;         /* [batch, N+1] node index; -1: none, and in padding */
    uint32_t *ancestors;                         /* [batch, N+1, ceil((N+1)/32)] bits, LSB first, self included; padding 0 */
    int32_t *n_nodes;                            /* [batch] root included */
    float *score;                                /* [batch, N+1] sum of the path's log-probs; 0 at the root and in padding */
} kdtree_tree;

KDTREE_API int32_t kdtree_tree_build_workspace(const kdtree_build_input *in, size_t *bytes);
KDTREE_API int32_t kdtree_tree_build(const kdtree_build_input *in, const kdtree_tree *out, void *workspace,
                                     size_t workspace_bytes, kdtree_stream stream);

/* ---- tree_build_path: the same where a candidate's log-prob depends on its parent ----
 * Siblings are ranked by (log-prob descending, candidate ascending); a node's score is the float32 sum down its path, and the
 * order is tree_build's. */
typedef struct {
    const float *first;       /* [batch, k] of the candidates of depth 1; not finite: no candidate, here and below */
    const float *conditional; /* [batch, levels-1, k, k]; [d-1, i, j]: of candidate j of depth d+1 after i of depth d */
    const int32_t *ids;       /* [batch, levels, k] */
    const int32_t *root;      /* [batch] token of node 0 */
    const int32_t *seq_len;   /* [batch] position of node 0 */
    const int32_t *budget;    /* [batch] nodes wanted besides the root; read as 0 … max_budget */
    int32_t batch, levels, k; /* levels ≤ 64, k ≤ 128 */
    int32_t max_budget;       /* N ≤ 1023 */
} kdtree_path_input;

KDTREE_API int32_t kdtree_tree_build_path_workspace(const kdtree_path_input *in, size_t *bytes);
KDTREE_API int32_t kdtree_tree_build_path(const kdtree_path_input *in, const kdtree_tree *out, void *workspace,
                                          size_t workspace_bytes, kdtree_stream stream);

/* ---- tree_select: of all trees together the nodes that are worth what they cost; tree_learn: how nodes like them fared ----
 * A node's chance is its parent's times (hits[own] + prior * known) / (cases[own] + prior), known being the same of the cell of
 * all depths, with exp(its log-prob) in place of known. Cell (kind, depth, straight, bin): depth 0 stands for all depths,
 * `depths` for it and the deeper ones; straight: all nodes before it were first children; bin: edges below its
 * log-prob. All nodes compete: chance times luck, at most 1 and no more than that of the nodes before it in its tree, less the
 * tree's price; ties by tree, then by node. The first n are kept, n being the smallest for which the sum of their chances less
 * their prices less cost(n) is largest. Sums are of whole multiples of 2^-24, so exact. Prices are cut to 0 … 2^16 tokens,
 * costs to ±2^20. What is in kdtree_prices may lie in pinned host memory, and so may kept and expected. */
typedef struct {
    float *cases, *hits; /* [kinds, 1 + depths, 2, edges_count + 1] */
    const float *edges;  /* [edges_count] log-probs, ascending */
    int32_t kinds, depths, edges_count;
    float prior; /* cases that what is known otherwise counts as, > 0 */
} kdtree_acceptance;

typedef struct {
    const int32_t *kind; /* [batch] of each tree, for the table */
    const float *luck;   /* [batch] times what the table says its chances are */
    const int32_t *most; /* [batch] nodes that it may keep */
    const double *price; /* [batch] tokens that a node of it costs beside cost(n); negative: it keeps as many as it may */
    const int32_t *at;   /* [knots] numbers of nodes, ascending from 0 */
    const double *cost;  /* [knots] tokens that so many nodes cost; straight between two, and beyond the last two */
    int32_t knots;       /* 1 … 256 */
} kdtree_prices;

KDTREE_API int32_t kdtree_tree_select_workspace(int32_t batch, int32_t nodes, size_t *bytes);
/* `tree` as tree_build left it, batch ≤ 1024, nodes = N+1; cut: n_nodes, first_child and next_sibling. gains [batch, N] chances
 * without luck, 0 in padding; cells [batch, N] flat index into the table, -1 in padding; kept [batch] nodes besides the root;
 * expected [batch] of them accepted, with luck. Nodes are compared with those of every tree, so the time grows with
 * batch^2 * N. */
KDTREE_API int32_t kdtree_tree_select(const kdtree_tree *tree, int32_t batch, int32_t nodes, int32_t max_depth,
                                      const kdtree_acceptance *table, const kdtree_prices *prices, float *gains, int32_t *cells,
                                      int32_t *kept, float *expected, void *workspace, size_t workspace_bytes,
                                      kdtree_stream stream);
/* Counts in the table, of nodes that were kept and whose parents were accepted, those that were accepted: path [batch,
 * max_depth+1] and n_accepted [batch] as tree_accept wrote them, parent [batch, nodes] of the tree. A cell with more than
 * `memory` cases then counts half. */
KDTREE_API int32_t kdtree_tree_learn(const kdtree_acceptance *table, const int32_t *cells, const int32_t *parent,
                                     const int32_t *kept, const int32_t *path, int32_t max_depth, const int32_t *n_accepted,
                                     int32_t batch, int32_t nodes, float memory, kdtree_stream stream);

/* ---- tree_accept: the path on which every token is the target's own ----
 * y [batch, nodes]: the target's token at each node; of `tree`, tokens, first_child and next_sibling are read.
 * path [batch, max_depth+1] node indices, starts with 0, -1 past its end; n_accepted [batch] its length; bonus [batch] y at
 * its last node. nodes = N+1. */
KDTREE_API int32_t kdtree_tree_accept(const int32_t *y, const kdtree_tree *tree, int32_t batch, int32_t nodes,
                                      int32_t max_depth, int32_t *path, int32_t *n_accepted, int32_t *bonus,
                                      kdtree_stream stream);

/* ---- kv_compact: moves the rows of accepted paths to slots seq_len, seq_len+1, …, in every layer, in one launch ---- */
typedef struct { /* host array; row of flat slot t in layer l: base + l * layer_stride + t * slot_stride bytes */
    void *base;
    int64_t layer_stride, slot_stride;
    int32_t layers, row_bytes; /* strides, base and row_bytes: multiples of 2; of 16 is fastest */
} kdtree_cache;

/* caches: host, 1 … 128; page_table [sequences, pages]; path [sequences, max_path] as tree_accept wrote it. */
KDTREE_API int32_t kdtree_kv_compact(const kdtree_cache *caches, int32_t cache_count, const int32_t *page_table, int32_t pages,
                                     int32_t page_size, const int32_t *seq_len, const int32_t *path, int32_t max_path,
                                     const int32_t *n_accepted, int32_t sequences, kdtree_stream stream);

/* ---- verify_attn: draft trees and prompt chunks over a paged KV cache ----
 * Row i of sequence s is row row_offsets[s] + i of q; its own key and value lie at slot seq_len[s] + i. It sees the seq_len[s]
 * committed slots and, of the step's own rows, those ≤ i (causal) or those in its ancestor bits (a tree). */
typedef struct {
    const int32_t *row_offsets;    /* [sequences+1], from 0 to total_rows */
    const int32_t *q_len;          /* [sequences] rows in use; the others give out 0 and lse -inf */
    const int32_t *seq_len;        /* [sequences] committed slots */
    const int32_t *page_table;     /* [sequences, pages]; entries past a sequence's end are never used */
    const uint8_t *causal;         /* [sequences] 0: a tree */
    const uint32_t *ancestors;     /* [total_rows, ancestor_words], unused where causal */
    int32_t sequences, total_rows; /* ≤ 1024 sequences */
    int32_t pages, page_size, ancestor_words;
} kdtree_rows;

typedef struct {
    int32_t heads, kv_heads; /* query head h reads key head h / (heads / kv_heads); MLA: kv_heads 1 */
    int32_t head_dim, v_dim; /* GQA: equal; MLA: 576 and 512, the value is the first 512 columns of the key */
    int32_t dtype;           /* of q, caches and out: KDTREE_BFLOAT16 or KDTREE_FLOAT16 */
    int32_t split;           /* 0: KV is cut where it is fastest; else a multiple of 64 slots, cut there whatever the batch,
                                so that a sequence's bits do not depend on the others */
    int32_t kernel;          /* KDTREE_KERNEL_… */
    float scale;             /* of the scores, before the softmax */
} kdtree_attn;

/* MLA: the fastest here, or a given one. PORTABLE_SMALL keeps to the 99 KB of shared memory that small GPUs have. */
enum { KDTREE_KERNEL_AUTO = 0, KDTREE_KERNEL_PORTABLE = 1, KDTREE_KERNEL_HOPPER = 2, KDTREE_KERNEL_PORTABLE_SMALL = 3 };

/* The plan cuts the step into work items on the device; one plan serves every layer whose kdtree_attn is the same. */
KDTREE_API int32_t kdtree_verify_attn_plan_size(const kdtree_rows *rows, const kdtree_attn *attn, size_t *bytes);
KDTREE_API int32_t kdtree_verify_attn_plan(const kdtree_rows *rows, const kdtree_attn *attn, void *plan, size_t plan_bytes,
                                           kdtree_stream stream);
KDTREE_API int32_t kdtree_verify_attn_workspace(const kdtree_rows *rows, const kdtree_attn *attn, size_t *bytes);

typedef struct {
    const void *q;                        /* [total_rows, heads, head_dim], aligned to 16 bytes */
    const void *k_cache, *v_cache;        /* GQA [slots, kv_heads, head_dim]; MLA [slots, 576], v_cache ignored; 16 bytes */
    int64_t k_slot_stride, v_slot_stride; /* elements between slots, multiples of 8 */
    int64_t slots;                        /* pages × page_size of the cache */
    void *out;                            /* [total_rows, heads, v_dim], aligned to 16 bytes */
    float *lse;                           /* [total_rows, heads] natural log of the softmax denominator */
} kdtree_attn_tensors;

KDTREE_API int32_t kdtree_verify_attn(const kdtree_rows *rows, const kdtree_attn *attn, const kdtree_attn_tensors *tensors,
                                      const void *plan, void *workspace, size_t workspace_bytes, kdtree_stream stream);

#ifdef __cplusplus
}
#endif
#endif
