#pragma once

#include "cuda_runtime.h"

using __half = _Float16;

struct __half2 {
    __half x, y;
};
inline float __half2float(__half x) { return x; }
inline __half __ushort_as_half(uint16_t bits) {
    __half x;
    return memcpy(&x, &bits, 2), x;
}
inline __half2 __floats2half2_rn(float x, float y) { return {static_cast<__half>(x), static_cast<__half>(y)}; }
inline __half2 __hmax2(__half2 a, __half2 b) {
    return __floats2half2_rn(std::fmax(float(a.x), float(b.x)), std::fmax(float(a.y), float(b.y)));
}
