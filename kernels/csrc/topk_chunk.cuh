// A chunk of a row of logits: its place in memory, how it is read, what its elements are. Knows nothing of selection.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "topk_select.cuh"

namespace kdtree::topk {

constexpr int kScanThreads = 512;
constexpr int kVectors = 4;  // 16-byte loads per thread, all in flight at once
constexpr int kChunkBytes = kScanThreads * kVectors * 16;

// How 32-bit words hold logits. `larger` works on all logits of a word at once and passes over NaN.
template <int dtype>
struct Format;

template <>
struct Format<KDTREE_FLOAT32> {
    using Element = uint32_t;
    static constexpr uint32_t kMinusInfinity = 0xff800000u;
    __device__ static float value(uint32_t word, int) { return __uint_as_float(word); }
    __device__ static uint32_t larger(uint32_t a, uint32_t b) {
        return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
    }
};

template <>
struct Format<KDTREE_BFLOAT16> {
    using Element = uint16_t;
    static constexpr uint32_t kMinusInfinity = 0xff80u;
    __device__ static float value(uint32_t word, int half) { return __uint_as_float(half ? word & 0xffff0000u : word << 16); }
    __device__ static uint32_t larger(uint32_t a, uint32_t b) {
        const __nv_bfloat162 c = __hmax2(reinterpret_cast<__nv_bfloat162 &>(a), reinterpret_cast<__nv_bfloat162 &>(b));
        return reinterpret_cast<const uint32_t &>(c);
    }
};

template <>
struct Format<KDTREE_FLOAT16> {
    using Element = uint16_t;
    static constexpr uint32_t kMinusInfinity = 0xfc00u;
    __device__ static float value(uint32_t word, int half) {
        return __half2float(__ushort_as_half(static_cast<uint16_t>(half ? word >> 16 : word)));
    }
    __device__ static uint32_t larger(uint32_t a, uint32_t b) {
        const __half2 c = __hmax2(reinterpret_cast<__half2 &>(a), reinterpret_cast<__half2 &>(b));
        return reinterpret_cast<const uint32_t &>(c);
    }
};

struct Rows {
    const void *logits;
    int64_t stride;
    int vocab;
    int32_t first_id;
};

// Where a chunk lies: vector n of it, 16 bytes at a 16-byte boundary wherever the row starts, has the logits of columns
// column + n · kPerVector and up. Columns outside the row hold -inf.
template <int dtype>
struct Chunk {
    using Element = typename Format<dtype>::Element;
    static constexpr int kPerWord = 4 / sizeof(Element);
    static constexpr int kPerVector = 16 / sizeof(Element);

    static constexpr int kColumns = kVectors * kScanThreads * kPerVector;

    const Element *row;
    int vocab, column;
    bool whole;  // no column outside the row

    __device__ Chunk(const Rows &rows, int64_t index, int chunk) : vocab(rows.vocab) {
        row = static_cast<const Element *>(rows.logits) + index * rows.stride;
        const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(Element));
        column = chunk * kColumns - skew;
        whole = column >= 0 && column + kColumns <= vocab;
    }

    // The vectors thread, thread + kScanThreads, …
    __device__ void load(uint4 (&vectors)[kVectors]) const {
        const int first = column + static_cast<int>(threadIdx.x) * kPerVector;
        if (whole) {
            const uint4 *from = reinterpret_cast<const uint4 *>(row + first);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                vectors[v] = __ldcs(from + v * kScanThreads);
            }
        } else {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                vectors[v] = load_within(first + v * kScanThreads * kPerVector);
            }
        }
    }

    __device__ static float value(const uint4 &vector, int i) {
        const int at = i / kPerWord;
        return Format<dtype>::value(at == 0 ? vector.x : at == 1 ? vector.y : at == 2 ? vector.z : vector.w, i % kPerWord);
    }

    __device__ static float largest(const uint4 (&vectors)[kVectors]) {
        uint32_t word = vectors[0].x;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const uint32_t ab = Format<dtype>::larger(vectors[v].x, vectors[v].y);
            const uint32_t cd = Format<dtype>::larger(vectors[v].z, vectors[v].w);
            word = Format<dtype>::larger(word, Format<dtype>::larger(ab, cd));
        }
        return fmaxf(fmaxf(Format<dtype>::value(word, 0), Format<dtype>::value(word, kPerWord - 1)), -INFINITY);
    }

    // The softmax of the thread's logits, `best` the largest of them.
    __device__ static Mass mass_of(const uint4 *mine, float best) {
        const float peak = fmaxf(best, -FLT_MAX);
        // exp(x - peak) as 2^(x · scale - shift), one instruction for its argument, and what rounding `shift` lost put back at
        // the end. Above 2^28 neighbouring floats are so far apart that only logits equal to the peak count.
        const float scale = fabsf(peak) < 0x1p28f ? kLog2E : 1.0f;
        const float shift = peak * scale;
        float sums[4] = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const uint4 vector = mine[v * kScanThreads];
#pragma unroll
            for (int i = 0; i < kPerVector; ++i) {
                sums[i % 4] += exp2_approx(fmaf(value(vector, i), scale, -shift));
            }
        }
        const float lost = fmaf(peak, scale, -shift);
        return {peak, ((sums[0] + sums[1]) + (sums[2] + sums[3])) * exp2_approx(-lost)};
    }

    // What is not finite becomes -inf. Rare, so few registers matter more than speed.
    __device__ static uint4 sanitised(const uint4 &vector) {
        constexpr int kBits = 8 * sizeof(Element);
        uint64_t low = 0, high = 0;
#pragma unroll 1
        for (int i = kPerVector - 1; i >= 0; --i) {
            const uint32_t word = i / kPerWord == 0   ? vector.x
                                  : i / kPerWord == 1 ? vector.y
                                  : i / kPerWord == 2 ? vector.z
                                                      : vector.w;
            const uint32_t bits = static_cast<Element>(word >> (i % kPerWord * 16));
            high = high << kBits | low >> (64 - kBits);
            low = low << kBits |
                  (fabsf(Format<dtype>::value(word, i % kPerWord)) < INFINITY ? bits : Format<dtype>::kMinusInfinity);
        }
        return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
                static_cast<uint32_t>(high >> 32)};
    }

  private:
    __device__ uint4 load_within(int first) const {
        if (first >= 0 && first + kPerVector <= vocab) {
            return __ldcs(reinterpret_cast<const uint4 *>(row + first));
        }
        uint32_t words[4] = {};
#pragma unroll
        for (int i = 0; i < kPerVector; ++i) {
            const bool inside = first + i >= 0 && first + i < vocab;
            words[i / kPerWord] |= (inside ? row[first + i] : Format<dtype>::kMinusInfinity) << (i % kPerWord * 16);
        }
        return {words[0], words[1], words[2], words[3]};
    }
};

}  // namespace kdtree::topk
