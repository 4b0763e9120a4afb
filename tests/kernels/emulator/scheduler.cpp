#include "scheduler.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;
extern char __start_block_shared[], __stop_block_shared[];  // static shared memory, see __shared__

namespace emulator {
namespace {

constexpr size_t kStackBytes = 64 << 10, kCanaryBytes = 4 << 10;
constexpr int kMostThreads = 1024, kBarriers = 16;
constexpr char kCanary = 0x3c;

enum class State { kReady, kTogether, kAtBarrier, kDone };
enum class Landing { kAtOnce, kLate, kAnyTime };

struct Copy {
    char *target;
    const void *source;
    void (*then)(void *);
    int group;
};

struct Fiber {
    jmp_buf context;
    State state;
    Run run;
    void *operands;
    int barrier, group;  // group: of copies, the one not committed yet
    std::deque<Copy> copies;
};

struct Barrier {
    int arrived, threads, votes, result;
};

std::unique_ptr<char[]> stacks;
std::vector<Fiber> fibers;  // on their stacks, between two blocks; a launch uses the first ones
Fiber *current;
jmp_buf scheduler;
const std::function<void()> *body;
Barrier barriers[kBarriers];
size_t dynamic_bytes;
Landing landing;
int alive;  // fibers of the block that are not done
bool progress, failed;
std::string error;

unsigned below(unsigned n) {
    static std::mt19937 bits(1);
    return bits() % n;
}

void suspend() {
    if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

void resume(int thread) {
    current = &fibers[thread];
    threadIdx.x = thread;
    if (!_setjmp(scheduler)) _longjmp(current->context, 1);
}

void fiber_main() {
    for (;;) {
        suspend();
        (*body)();
        if (!current->copies.empty()) fail("a thread ended before its copies");
        current->state = State::kDone;
        progress = true;
        --alive;
    }
}

void make_fibers(size_t count) {
    if (!stacks) stacks.reset(new char[kStackBytes * kMostThreads]);
    while (fibers.size() < count) {
        ucontext_t here, start;
        getcontext(&start);
        start.uc_stack.ss_sp = stacks.get() + fibers.size() * kStackBytes;
        start.uc_stack.ss_size = kStackBytes;
        makecontext(&start, fiber_main, 0);
        current = &fibers.emplace_back();
        if (!_setjmp(scheduler)) swapcontext(&here, &start);
    }
}

// The first `most` copies of a thread. Whether there was one.
bool land(Fiber &fiber, int most) {
    const bool any = most && !fiber.copies.empty();
    for (; most && !fiber.copies.empty(); --most) {
        const auto [target, source, then, group] = fiber.copies.front();
        fiber.copies.pop_front();
        if (then) {
            then(target);
        } else if (source) {
            memcpy(target, source, 16);
        } else {
            memset(target, 0, 16);
        }
    }
    progress |= any;
    return any;
}

// Every lane that can goes on until it waits; where all wait for a warp-wide instruction, it happens. Whether anything did.
bool run_warp(int warp) {
    Fiber *const lanes = &fibers[32 * warp];
    progress = false;
    for (int i = 0, turn = below(32); i < 32 && !failed; ++i) {
        const int lane = (i + turn) % 32;
        if (lanes[lane].state == State::kReady) resume(32 * warp + lane);
    }
    const auto waits = [&](const Fiber &x) { return x.state == State::kTogether && x.run == lanes->run; };
    if (failed || !std::all_of(lanes, lanes + 32, waits)) return progress;
    void *operands[32];
    for (int lane = 0; lane < 32; ++lane) {
        operands[lane] = lanes[lane].operands;
        lanes[lane].state = State::kReady;
    }
    lanes->run(operands);
    return progress = true;
}

// Something happens in a block in which nothing seems to: a warp goes on, or the copies of some threads land.
bool stir(int threads) {
    for (int warp = 0; warp < threads / 32; ++warp) {
        if (run_warp(warp)) return true;
    }
    bool landed = false;
    for (int i = 0, part = below(4); i < threads; ++i) landed |= below(4) >= part && land(fibers[i], INT_MAX);
    return landed || std::any_of(fibers.begin(), fibers.begin() + threads, [](Fiber &x) { return land(x, 1); });
}

void run_block(int threads) {
    const int warps = threads / 32;
    char *const canary = shared_memory + dynamic_bytes;
    memset(shared_memory, 0xff, dynamic_bytes);
    memset(__start_block_shared, 0xff, __stop_block_shared - __start_block_shared);
    memset(canary, kCanary, kCanaryBytes);
    memset(barriers, 0, sizeof barriers);
    landing = static_cast<Landing>(below(3));
    alive = threads;
    for (int i = 0; i < threads; ++i) fibers[i].state = State::kReady;
    for (int idle = 0; alive && !failed;) {
        const int warp = below(warps);
        bool happened = false;
        for (int rounds = 1 << below(8); rounds && run_warp(warp); --rounds) happened = true;
        for (int i = landing == Landing::kAnyTime ? below(warps) : 0; i; --i) {
            happened |= land(fibers[below(threads)], 1 << below(6));
        }
        idle = happened ? 0 : idle + 1;
        if (idle < 2 * warps || failed || !alive) continue;
        idle = 0;
        if (stir(threads) || failed) continue;
        const auto count = [&](State state) {
            const auto is = [&](const Fiber &x) { return x.state == state; };
            return std::to_string(std::count_if(fibers.begin(), fibers.begin() + threads, is));
        };
        error = "deadlock: " + count(State::kReady) + " threads spin, " + count(State::kTogether) + " wait for their warp, " +
                count(State::kAtBarrier) + " at barriers";
        failed = true;
    }
    if (!failed && std::count(canary, canary + kCanaryBytes, kCanary) != kCanaryBytes) {
        error = "shared memory was written past its end";
        failed = true;
    }
}

}  // namespace

alignas(1024) char shared_memory[kSharedBytes + kCanaryBytes];

const char *last_error() { return error.c_str(); }

bool launch(Grid grid, int threads, size_t shared_bytes, const std::function<void()> &kernel) {
    const unsigned blocks = grid.x * grid.y * grid.z;
    if (threads < 1 || threads > kMostThreads || threads % 32 || shared_bytes > kSharedBytes || !blocks) {
        error = "invalid launch";
        return false;
    }
    body = &kernel;
    dynamic_bytes = shared_bytes;
    blockDim = dim3(threads);
    gridDim = dim3(grid.x, grid.y, grid.z);
    failed = false;
    make_fibers(threads);
    for (unsigned i = 0; i < blocks && !failed; ++i) {
        blockIdx = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
        run_block(threads);
    }
    if (failed) fibers.clear();  // they are stuck inside the kernel
    return !failed;
}

void fail(const char *what) {
    error = std::string(what) + ", thread " + std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x);
    failed = true;
    for (;;) suspend();
}

void yield() { suspend(); }

void changed() { progress = true; }

void together(Run run, void *operands) {
    current->run = run;
    current->operands = operands;
    current->state = State::kTogether;
    suspend();
}

int barrier(int id, int threads, int vote) {
    Barrier &b = barriers[id];
    if (!b.arrived) b.threads = threads;
    if (b.threads != threads) fail("a barrier with two thread counts");
    progress = true;
    b.votes += vote;
    if (++b.arrived == threads) {
        b.arrived = 0;
        b.result = std::exchange(b.votes, 0);
        for (Fiber &fiber : fibers) {
            if (fiber.state == State::kAtBarrier && fiber.barrier == id) fiber.state = State::kReady;
        }
    } else {
        current->barrier = id;
        current->state = State::kAtBarrier;
        suspend();
    }
    return b.result;
}

void start_copy(char *target, const void *source, void (*then)(void *)) {
    current->copies.push_back({target, source, then, current->group});
    if (landing == Landing::kAtOnce) land(*current, 1);
}

void commit_copies() { ++current->group; }

void wait_for_copies(int pending_groups) {
    while (!current->copies.empty() && current->copies.front().group < current->group - pending_groups) land(*current, 1);
}

}  // namespace emulator
