// Runs CUDA kernels on the CPU, so that the tests execute the sources of kernels/csrc on machines without a GPU. Blocks run one
// after another; each of a block's threads is a fiber. Knows no instruction: those are in include/ and ptx_emulated.h.
//
// Modelled: warps that drift apart by any amount (a random one runs for a random while); lanes that meet only at warp-wide
// instructions, which all 32 must reach together; barriers with their thread counts; asynchronous copies that land when they
// are waited for, at once, or at a random time between; shared memory full of NaN when a block starts, with a canary behind it.
// Not modelled: weak memory order (all see a write at once; a thread's copies land in order); blocks that run at the same time;
// streams; limits of registers and of instructions; bounds and alignment of global memory; warp-wide instructions of part of a
// warp; shared memory that is static in a template with external linkage (it keeps what it held); Hopper's copy engine, tensor
// cores and their proxies, so attn_mla_hopper.cu is left out; the last bits of mma.sync and of approximate functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulator {

constexpr int kMultiprocessors = 4;  // few, so that a block has several items and sequences are cut
constexpr size_t kSharedBytes = 227 << 10;
extern char shared_memory[];  // what a launch asks for

struct Grid {
    unsigned x, y, z;
};

// Whether all went well; else last_error() says what did not.
bool launch(Grid grid, int threads, size_t shared_bytes, const std::function<void()> &kernel);
const char *last_error();

// ---- for the fibers ----
[[noreturn]] void fail(const char *what);
void yield();    // for others to change what this thread waits for
void changed();  // something that others may wait for has

// Waits until every lane of the warp has come here with the same `run`, which then runs once, on all lanes' operands.
using Run = void (*)(void **operands);
void together(Run run, void *operands);

// Waits for `threads` threads at barrier `id`. Returns the sum of their votes.
int barrier(int id, int threads, int vote = 0);

// Starts a copy of 16 bytes, zeros where source is null; with `then`, that instead, once this thread's copies so far landed.
void start_copy(char *target, const void *source, void (*then)(void *target) = nullptr);
void commit_copies();
void wait_for_copies(int pending_groups);  // -1: for copies that are not committed, too

}  // namespace emulator
