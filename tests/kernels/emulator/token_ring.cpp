// A kernel that does nothing but wait and arrive: warps pass a token round. With an argument, none of them has it.
#include <cstdio>

#include "mma.cuh"

constexpr int kWarps = 12, kRounds = 100;

int main(int arguments, char **) {
    int passed = 0;
    const bool good = emulator::launch({1, 1, 1}, 32 * kWarps, 0, [&] {
        __shared__ kdtree::Barrier tokens[kWarps];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) kdtree::barrier_init(tokens[warp], 1);
        __syncthreads();
        if (threadIdx.x == 0 && arguments == 1) kdtree::barrier_arrive(tokens[0]);
        for (int round = 0; round < kRounds; ++round) {
            kdtree::barrier_wait(tokens[warp], round % 2);
            if (lane) continue;
            ++passed;
            kdtree::barrier_arrive(tokens[(warp + 1) % kWarps]);
        }
    });
    std::printf("%d passed: %s\n", passed, good ? "done" : emulator::last_error());
}
