// The C functions of verify_attn: checks, then the choice of a kernel. Knows no kernel's inside.
#include "attn.cuh"

namespace kdtree {
namespace {

constexpr int kSmallSharedBytes = 99 << 10;  // what a block may have on sm_86, sm_89 and sm_120

bool hopper_serves(const kdtree_rows &rows, const Device &device) {
#ifdef KDTREE_HOPPER
    const int page = rows.page_size;
    return device.major == 9 && (page % kBlockSlots == 0 || page == 8 || page == 16 || page == 32);
#else
    return false;
#endif
}

int32_t check(const kdtree_rows *rows, const kdtree_attn *attn, Device *device) {
    if (!rows || !attn) return KDTREE_BAD_ARGUMENT;
    if (rows->sequences < 0 || rows->total_rows < 0 || rows->pages < 0 || rows->page_size < 1 || rows->ancestor_words < 0) {
        return KDTREE_BAD_ARGUMENT;
    }
    if (attn->heads < 1 || attn->kv_heads < 1 || attn->heads % attn->kv_heads || attn->split < 0) return KDTREE_BAD_ARGUMENT;
    if (attn->kernel < KDTREE_KERNEL_AUTO || attn->kernel > KDTREE_KERNEL_PORTABLE_SMALL) return KDTREE_BAD_ARGUMENT;
    if (attn->dtype != KDTREE_BFLOAT16 && attn->dtype != KDTREE_FLOAT16) return KDTREE_UNSUPPORTED_SHAPE;
    if (rows->sequences > kMaxSequences || attn->split % kBlockSlots) return KDTREE_UNSUPPORTED_SHAPE;
    if (is_mla(*attn)) {
        if (attn->head_dim != 576 || attn->v_dim != 512 || attn->kv_heads != 1) return KDTREE_UNSUPPORTED_SHAPE;
    } else if (!gqa_serves(attn->head_dim)) {
        return KDTREE_UNSUPPORTED_SHAPE;
    }
    KDTREE_TRY(current_device(device));
    if (device->major < 8) return KDTREE_UNSUPPORTED_ARCHITECTURE;
    if (attn->kernel == KDTREE_KERNEL_HOPPER) {
        if (device->major != 9) return KDTREE_UNSUPPORTED_ARCHITECTURE;
        if (!is_mla(*attn) || !hopper_serves(*rows, *device)) return KDTREE_UNSUPPORTED_SHAPE;
    }
    return KDTREE_OK;
}

int32_t check_arrays(const kdtree_rows &rows) {
    if (!rows.sequences) return KDTREE_OK;
    const bool pages = rows.page_table || !rows.pages;  // an array without elements may have no address
    const bool ancestors = rows.ancestors || !rows.total_rows || !rows.ancestor_words;
    const bool all = rows.row_offsets && rows.q_len && rows.seq_len && rows.causal && pages && ancestors;
    return all ? KDTREE_OK : KDTREE_BAD_ARGUMENT;
}

int32_t check_tensors(const kdtree_attn_tensors &t, bool mla) {
    if (!t.q || !t.k_cache || !t.out || !t.lse || (!mla && !t.v_cache)) return KDTREE_BAD_ARGUMENT;
    if (t.slots < 0 || t.k_slot_stride < 0 || t.v_slot_stride < 0) return KDTREE_BAD_ARGUMENT;
    const bool strides = t.k_slot_stride % 8 == 0 && (mla || t.v_slot_stride % 8 == 0);
    const bool pointers = aligned(t.q, 16) && aligned(t.k_cache, 16) && aligned(t.out, 16) && (mla || aligned(t.v_cache, 16));
    return strides && pointers && aligned(t.lse, 4) ? KDTREE_OK : KDTREE_MISALIGNED;
}

int32_t launch(const AttnCall &call) {
    if (!is_mla(call.attn)) return launch_gqa(call);
#ifdef KDTREE_HOPPER
    const int kernel = call.attn.kernel;
    const bool hopper =
        kernel == KDTREE_KERNEL_HOPPER || (kernel == KDTREE_KERNEL_AUTO && hopper_serves(call.rows, call.device));
    if (hopper) return launch_mla_hopper(call);
#endif
    return launch_mla_portable(call);
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" {

int32_t kdtree_verify_attn_plan_size(const kdtree_rows *rows, const kdtree_attn *attn, size_t *bytes) {
    Device device;
    if (!bytes) return KDTREE_BAD_ARGUMENT;
    KDTREE_TRY(check(rows, attn, &device));
    *bytes = plan_limits(*rows, *attn, device).plan_bytes;
    return KDTREE_OK;
}

int32_t kdtree_verify_attn_workspace(const kdtree_rows *rows, const kdtree_attn *attn, size_t *bytes) {
    Device device;
    if (!bytes) return KDTREE_BAD_ARGUMENT;
    KDTREE_TRY(check(rows, attn, &device));
    *bytes = plan_limits(*rows, *attn, device).workspace_bytes;
    return KDTREE_OK;
}

int32_t kdtree_verify_attn_plan(const kdtree_rows *rows, const kdtree_attn *attn, void *plan, size_t plan_bytes,
                                kdtree_stream stream) {
    Device device;
    KDTREE_TRY(check(rows, attn, &device));
    KDTREE_TRY(check_arrays(*rows));
    if (!plan) return KDTREE_BAD_ARGUMENT;
    if (!aligned(plan, 256)) return KDTREE_MISALIGNED;
    if (plan_bytes < plan_limits(*rows, *attn, device).plan_bytes) return KDTREE_WORKSPACE_TOO_SMALL;
    return launch_plan(*rows, *attn, device, plan, stream);
}

int32_t kdtree_verify_attn(const kdtree_rows *rows, const kdtree_attn *attn, const kdtree_attn_tensors *tensors,
                           const void *plan, void *workspace, size_t workspace_bytes, kdtree_stream stream) {
    AttnCall call{};
    KDTREE_TRY(check(rows, attn, &call.device));
    if (!rows->total_rows) return KDTREE_OK;
    KDTREE_TRY(check_arrays(*rows));
    if (!tensors || !plan) return KDTREE_BAD_ARGUMENT;
    KDTREE_TRY(check_tensors(*tensors, is_mla(*attn)));
    const PlanLimits limits = plan_limits(*rows, *attn, call.device);
    if (limits.workspace_bytes && !workspace) return KDTREE_BAD_ARGUMENT;
    if (!aligned(plan, 256) || !aligned(workspace, 256)) return KDTREE_MISALIGNED;
    if (workspace_bytes < limits.workspace_bytes) return KDTREE_WORKSPACE_TOO_SMALL;

    call.rows = *rows;
    call.attn = *attn;
    call.tensors = *tensors;
    call.plan = plan_view(*rows, const_cast<void *>(plan));
    call.partial_out = static_cast<float *>(workspace);
    call.partial_lse = call.partial_out + limits.partials * kTileRows * attn->v_dim;  // v_dim floats keep it aligned
    call.stream = stream;
    if (attn->kernel == KDTREE_KERNEL_PORTABLE_SMALL) call.device.shared_bytes = kSmallSharedBytes;
    KDTREE_TRY(launch(call));
    return launch_combine(call);
}

}  // extern "C"
