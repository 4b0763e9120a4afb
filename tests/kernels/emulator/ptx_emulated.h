// What ptx.cuh declares, on the host. Included in its place; shared addresses count from the start of dynamic shared memory.

inline uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(static_cast<const char *>(pointer) - emulator::shared_memory);
}

inline char *shared_at(uint32_t address) { return emulator::shared_memory + static_cast<int32_t>(address); }  // static: < 0

inline char *aligned_16(uint32_t address) {
    if (address % 16 || address + 16 > emulator::kSharedBytes) emulator::fail("a bad address in shared memory");
    return shared_at(address);
}

inline float load_shared(uint32_t address) {
    float value;
    return memcpy(&value, shared_at(address), 4), value;
}

template <typename T>
T &shared(uint32_t address) {
    return *reinterpret_cast<T *>(shared_at(address));
}

template <bool transposed>
void ldmatrix(uint32_t (&out)[4], uint32_t address) {
    struct Lane {
        const char *row;
        uint32_t *out;
    } mine{aligned_16(address), out};
    emulator::together(
        [](void **lanes) {
            for (int matrix = 0; matrix < 4; ++matrix) {
                uint16_t x[8][8];
                for (int row = 0; row < 8; ++row) memcpy(x[row], static_cast<Lane *>(lanes[8 * matrix + row])->row, 16);
                for (int lane = 0; lane < 32; ++lane) {
                    const int g = lane / 4, t = 2 * (lane % 4);
                    const uint32_t low = transposed ? x[t][g] : x[g][t], high = transposed ? x[t + 1][g] : x[g][t + 1];
                    static_cast<Lane *>(lanes[lane])->out[matrix] = high << 16 | low;
                }
            }
        },
        &mine);
}

inline void ldmatrix_x4(uint32_t (&out)[4], uint32_t address) { ldmatrix<false>(out, address); }
inline void ldmatrix_x4_trans(uint32_t (&out)[4], uint32_t address) { ldmatrix<true>(out, address); }

template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    struct Lane {
        float *d;
        const uint32_t *a;
        uint32_t b[2];
    } mine{d, a, {b0, b1}};
    emulator::together(
        [](void **lanes) {
            float a[16][16], b[16][8], d[16][8] = {};
            for (int lane = 0; lane < 32; ++lane) {
                const auto &x = *static_cast<Lane *>(lanes[lane]);
                const int g = lane / 4, t = lane % 4;
                const auto unpack = [](uint32_t pair, float &low, float &high) {
                    T values[2];
                    memcpy(values, &pair, 4);
                    low = values[0], high = values[1];
                };
                for (int i = 0; i < 4; ++i) {
                    float *at = &a[g + i % 2 * 8][2 * t + i / 2 * 8];
                    unpack(x.a[i], at[0], at[1]);
                }
                for (int i = 0; i < 2; ++i) unpack(x.b[i], b[2 * t + 8 * i][g], b[2 * t + 8 * i + 1][g]);
            }
            for (int row = 0; row < 16; ++row) {
                for (int k = 0; k < 16; ++k) {
                    for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
                }
            }
            for (int lane = 0; lane < 32; ++lane) {
                float *out = static_cast<Lane *>(lanes[lane])->d;
                for (int i = 0; i < 4; ++i) out[i] += d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
            }
        },
        &mine);
}

inline void cp_async_16(uint32_t destination, const void *source, bool wanted) {
    emulator::start_copy(aligned_16(destination), wanted ? source : nullptr);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int Pending>
void cp_async_wait() {
    emulator::wait_for_copies(Pending);
}
inline void cp_async_wait_all() { emulator::wait_for_copies(-1); }

struct BarrierState {  // how a Barrier's 64 bits are used
    uint16_t arrivals, left;
    uint32_t phase;
};

inline void barrier_init(Barrier &barrier, int arrivals) {
    const auto count = static_cast<uint16_t>(arrivals);
    barrier = std::bit_cast<Barrier>(BarrierState{count, count, 0});
}

inline void barrier_arrive(Barrier &barrier) {
    auto state = std::bit_cast<BarrierState>(barrier);
    if (--state.left == 0) state.left = state.arrivals, ++state.phase;
    barrier = std::bit_cast<Barrier>(state);
    emulator::changed();
}

inline void barrier_arrive_after_copies(Barrier &barrier) {
    const auto arrive = [](void *at) { barrier_arrive(*static_cast<Barrier *>(at)); };
    emulator::start_copy(reinterpret_cast<char *>(&barrier), nullptr, arrive);
}

inline bool barrier_passed(Barrier &barrier, int parity) {
    if (std::bit_cast<BarrierState>(barrier).phase % 2 != static_cast<uint32_t>(parity)) return true;
    emulator::yield();
    return false;
}

inline void named_sync(int id, int threads) { emulator::barrier(id, threads); }

inline float exp2_approx(float x) { return std::exp2(x); }
