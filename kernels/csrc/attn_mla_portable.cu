// MLA-absorb attention with mma.sync: every architecture from sm_80 on, any page size. A key is 576 wide and its first 512
// columns are the value. Knows items (attn.cuh), not how they were cut. How the kernel works: mla_portable.cuh.
#include <algorithm>

#include "mla_scores.cuh"
#include "mla_values.cuh"

namespace kdtree {
namespace {

using namespace mla;

using Large = Config<64, 2, 8, false>;  // 226 KB of shared memory: sm_90, sm_100
using Small = Config<32, 1, 28, true>;  // 98 KB: all others

template <typename T, class C>
__global__ void __launch_bounds__(kThreads, 1) mla_kernel(const __grid_constant__ Parameters p) {
    KDTREE_DYNAMIC_SHARED(128, uint8_t, memory);
    auto &shared = *reinterpret_cast<Shared<C> *>(memory);
    if (static_cast<int>(blockIdx.x) >= p.header->items) return;
    if (const int warp = threadIdx.x / 32; warp < C::kSlots / 32) {
        if (threadIdx.x % 32 == 0) open<C>(shared.cursors[warp], p, blockIdx.x);
        __syncwarp();
        for (int stage = 0; stage < kStages; ++stage) {
            shared.slots[stage][threadIdx.x] = take_slot<C>(shared.cursors[warp], p, threadIdx.x).slot(p);
        }
    }
    if (threadIdx.x < kStages * (C::kSlots / kCopySlots)) barrier_init((&shared.landed[0][0])[threadIdx.x], kValueThreads);
    if (threadIdx.x == 0) {
        barrier_init(shared.scored, kScoreThreads);
        barrier_init(shared.taken, kValueThreads);
    }
    __syncthreads();
    if (threadIdx.x < kScoreThreads) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // registers can move from warp to warp; elsewhere each has 168
        asm volatile("setmaxnreg.dec.sync.aligned.u32 152;");
#endif
        ScoreWarp<T, C>(p, shared).run();
    } else {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
#endif
        ValueWarp<T, C>(p, shared).run();
    }
}

template <typename T, class C>
int32_t launch(const AttnCall &call) {
    constexpr int kBytes = sizeof(Shared<C>);
    KDTREE_TRY(from_cuda(cudaFuncSetAttribute(mla_kernel<T, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)));
    const int64_t slot_bytes = call.tensors.k_slot_stride * static_cast<int64_t>(sizeof(T));
    if (slot_bytes > INT32_MAX) return KDTREE_UNSUPPORTED_SHAPE;
    const int64_t items = plan_limits(call.rows, call.attn, call.device).items;
    const int ctas = static_cast<int>(std::min<int64_t>(attn_workers(call.attn, call.device), items));
    const Parameters p{call.rows,
                       call.tensors,
                       call.plan.header,
                       call.plan.items,
                       call.partial_out,
                       call.partial_lse,
                       call.attn.heads,
                       static_cast<int>(slot_bytes),
                       Division(call.rows.page_size),
                       call.attn.scale * kLog2e};
    return enqueue(mla_kernel<T, C>, ctas, kThreads, kBytes, call.stream, p);
}

template <typename T>
int32_t choose(const AttnCall &call) {
    static_assert(sizeof(Shared<Large>) <= 227 * 1024 && sizeof(Shared<Small>) <= 99 * 1024);
    if (call.device.shared_bytes >= static_cast<int>(sizeof(Shared<Large>))) return launch<T, Large>(call);
    if (call.device.shared_bytes >= static_cast<int>(sizeof(Shared<Small>))) return launch<T, Small>(call);
    return KDTREE_UNSUPPORTED_ARCHITECTURE;
}

}  // namespace

int32_t launch_mla_portable(const AttnCall &call) {
    return call.attn.dtype == KDTREE_BFLOAT16 ? choose<__nv_bfloat16>(call) : choose<__half>(call);
}

}  // namespace kdtree
