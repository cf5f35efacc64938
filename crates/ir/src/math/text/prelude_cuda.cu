#define KILN static __device__ __forceinline__

KILN unsigned int kiln_bits(float x) { return __float_as_uint(x); }
KILN float kiln_float(unsigned int x) { return __uint_as_float(x); }
KILN unsigned long long kiln_double_bits(double x) { return (unsigned long long)__double_as_longlong(x); }
KILN double kiln_double(unsigned long long x) { return __longlong_as_double((long long)x); }

/* A NaN wins, and of two zeros the positive is the larger. */
KILN float kiln_max_f32(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

KILN float kiln_min_f32(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

KILN float kiln_f16_to_f32(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

KILN unsigned short kiln_f32_to_f16(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

KILN unsigned short kiln_f32_to_bf16(float x) {
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

