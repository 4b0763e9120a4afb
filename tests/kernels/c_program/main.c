/* The kernels from plain C: logits -> candidates -> draft tree -> accepted path, all on the GPU, against values worked out by
 * hand. Where there is no GPU, only what needs none. Says the outcome in one line; exit status 0: as expected. */
#include <cuda_runtime_api.h>
#include <kdtree.h>
#include <stdio.h>
#include <string.h>

#define EXPECT(condition)                                           \
    do {                                                            \
        if (!(condition)) {                                         \
            printf("line %d: expected %s\n", __LINE__, #condition); \
            return 1;                                               \
        }                                                           \
    } while (0)

enum { LEVELS = 2, VOCAB = 4, K = 2, BUDGET = 4, NODES = BUDGET + 1 };

static void *device(size_t bytes, const void *content) { /* NULL where there is no memory; the checks below notice */
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes) == cudaSuccess && content) {
        cudaMemcpy(memory, content, bytes, cudaMemcpyHostToDevice);
    }
    return memory;
}

static int on_host(void) {
    static char space[256];
    kdtree_topk_input in = {space, VOCAB, KDTREE_FLOAT32, 1, VOCAB, K, 0};
    size_t bytes = 0;
    EXPECT(kdtree_abi_version() == KDTREE_ABI_VERSION);
    EXPECT(kdtree_max_qlen() >= 65);
    EXPECT(strcmp(kdtree_status_string(KDTREE_OK), "ok") == 0);
    EXPECT(kdtree_topk_logprobs_workspace(&in, &bytes) == KDTREE_OK && bytes > 0);
    EXPECT(kdtree_topk_logprobs_workspace(NULL, &bytes) == KDTREE_BAD_ARGUMENT);
    EXPECT(kdtree_topk_logprobs(&in, (float *)space, (int32_t *)space, space, 0, NULL) == KDTREE_WORKSPACE_TOO_SMALL);
    EXPECT(kdtree_tree_build(NULL, NULL, NULL, 0, NULL) == KDTREE_BAD_ARGUMENT);
    EXPECT(kdtree_tree_accept(NULL, NULL, 1, NODES, LEVELS, NULL, NULL, NULL, NULL) == KDTREE_BAD_ARGUMENT);
    in.k = 4096;
    EXPECT(kdtree_topk_logprobs_workspace(&in, &bytes) == KDTREE_UNSUPPORTED_SHAPE);
    return 0;
}

static int on_device(void) {
    /* Logits are ln p + 5. Depth 1: p(0) = 0.6, p(1) = 0.2; depth 2: p(3) = 0.5, p(2) = 0.3; the others 0.1.
     * Prefixes by probability: [0] 0.6, [0 3] 0.3, [1] 0.2, [0 2] 0.18, [1 3] 0.1: the first four are nodes 1 … 4. */
    const float logits[LEVELS * VOCAB] = {4.489174f, 3.390562f, 2.697415f, 2.697415f,
                                          2.697415f, 2.697415f, 3.796027f, 4.306853f};
    const int32_t root = 9, seq_len = 100, budget = BUDGET;
    const int32_t y[NODES] = {0, 2, 8, 8, 7}; /* token 0 is node 1, token 2 below it node 4, where the target says 7 */
    const int32_t want_tokens[NODES] = {9, 0, 3, 1, 2}, want_parent[NODES] = {-1, 0, 1, 0, 1}, want_path[] = {0, 1, 4};
    const kdtree_topk_input in = {device(sizeof logits, logits), VOCAB, KDTREE_FLOAT32, LEVELS, VOCAB, K, 0};
    float *logprobs = device(LEVELS * K * sizeof(float), NULL);
    int32_t *ids = device(LEVELS * K * sizeof(int32_t), NULL);
    const kdtree_build_input build = {logprobs, ids,   device(4, &root), device(4, &seq_len), device(4, &budget), 1, LEVELS,
                                      K,        BUDGET};
    const size_t row = NODES * sizeof(int32_t);
    const kdtree_tree tree = {device(row, NULL), device(row, NULL), device(row, NULL), device(row, NULL), device(row, NULL),
                              device(row, NULL), device(row, NULL), device(4, NULL),   device(row, NULL)};
    int32_t *path = device(sizeof want_path, NULL), *n_accepted = device(4, NULL), *bonus = device(4, NULL);
    const int32_t *draws = device(sizeof y, y);
    int32_t tokens[NODES], parent[NODES], got_path[LEVELS + 1], got_n, got_bonus;
    size_t topk_bytes = 0, build_bytes = 0;
    cudaStream_t stream;

    EXPECT(cudaStreamCreate(&stream) == cudaSuccess);
    EXPECT(kdtree_topk_logprobs_workspace(&in, &topk_bytes) == KDTREE_OK);
    EXPECT(kdtree_tree_build_workspace(&build, &build_bytes) == KDTREE_OK);
    void *topk_space = device(topk_bytes, NULL), *build_space = device(build_bytes + 1, NULL);
    EXPECT(kdtree_topk_logprobs(&in, logprobs, ids, topk_space, topk_bytes, stream) == KDTREE_OK);
    EXPECT(kdtree_tree_build(&build, &tree, build_space, build_bytes, stream) == KDTREE_OK);
    EXPECT(kdtree_tree_accept(draws, &tree, 1, NODES, LEVELS, path, n_accepted, bonus, stream) == KDTREE_OK);
    EXPECT(cudaStreamSynchronize(stream) == cudaSuccess);

    EXPECT(cudaMemcpy(tokens, tree.tokens, row, cudaMemcpyDeviceToHost) == cudaSuccess);
    EXPECT(cudaMemcpy(parent, tree.parent, row, cudaMemcpyDeviceToHost) == cudaSuccess);
    EXPECT(cudaMemcpy(got_path, path, sizeof got_path, cudaMemcpyDeviceToHost) == cudaSuccess);
    EXPECT(cudaMemcpy(&got_n, n_accepted, 4, cudaMemcpyDeviceToHost) == cudaSuccess);
    EXPECT(cudaMemcpy(&got_bonus, bonus, 4, cudaMemcpyDeviceToHost) == cudaSuccess);
    EXPECT(memcmp(tokens, want_tokens, row) == 0 && memcmp(parent, want_parent, row) == 0);
    EXPECT(got_n == 3 && got_bonus == 7 && memcmp(got_path, want_path, sizeof want_path) == 0);
    return 0;
}

int main(void) {
    int devices = 0;
    if (on_host()) {
        return 1;
    }
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        puts("ok without a GPU: versions, status texts and argument checks");
        return 0;
    }
    if (on_device()) {
        return 1;
    }
    puts("ok: a tree was drafted, built and accepted on the GPU");
    return 0;
}
