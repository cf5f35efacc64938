#include <math.h>
#include <stdbool.h>
#include <string.h>

#define KILN static inline

KILN unsigned int kiln_bits(float x) { unsigned int y; memcpy(&y, &x, 4); return y; }
KILN float kiln_float(unsigned int x) { float y; memcpy(&y, &x, 4); return y; }
KILN unsigned long long kiln_double_bits(double x) { unsigned long long y; memcpy(&y, &x, 8); return y; }
KILN double kiln_double(unsigned long long x) { double y; memcpy(&y, &x, 8); return y; }

KILN float kiln_max_f32(float a, float b) {
    float tied = kiln_float(kiln_bits(a) & kiln_bits(b));
    float y = a == b ? tied : a > b ? a : b;
    return a != a || b != b ? kiln_float(0x7fc00000u) : y;
}

KILN float kiln_min_f32(float a, float b) {
    float tied = kiln_float(kiln_bits(a) | kiln_bits(b));
    float y = a == b ? tied : a < b ? a : b;
    return a != a || b != b ? kiln_float(0x7fc00000u) : y;
}

KILN float kiln_f16_to_f32(unsigned short x) {
    unsigned int sign = (unsigned int)(x & 0x8000) << 16, exponent = x >> 10 & 31, rest = x & 0x3ff;
    if (exponent == 0) return kiln_float(kiln_bits((float)rest * 5.9604644775390625e-8f) | sign);
    if (exponent == 31) return kiln_float(sign | 0x7f800000u | rest << 13 | (rest != 0 ? 0x400000u : 0u));
    return kiln_float(sign | (exponent + 112) << 23 | rest << 13);
}

/* To nearest, halves to even; a NaN stays one. */
KILN unsigned short kiln_f32_to_f16(float x) {
    unsigned int bits = kiln_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (unsigned short)(sign | 0x7e00u | (size >> 13 & 0x3ffu));
    if (size >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    /* Below the normal range, the sum with 1/2 is rounded where the result must be. */
    if (size < 0x38800000u) return (unsigned short)(sign | (kiln_bits(kiln_float(size) + 0.5f) - 0x3f000000u));
    return (unsigned short)(sign | (size - 0x37fff001u + (size >> 13 & 1u)) >> 13);
}

KILN unsigned short kiln_f32_to_bf16(float x) {
    unsigned int bits = kiln_bits(x), rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return (unsigned short)(x != x ? bits >> 16 | 0x40u : rounded >> 16);
}

