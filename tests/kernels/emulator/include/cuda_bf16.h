#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;

    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float x) {  // to the nearest, ties to even
        const uint32_t wide = __float_as_uint(x);
        bits = x == x ? static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16) : 0x7fff;
    }
    operator float() const { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};

struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(std::fmax(a.x, b.x), std::fmax(a.y, b.y));
}
