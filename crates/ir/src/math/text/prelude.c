/* What text of kiln_ir::math::text relies on, the same in every dialect. KILN is how a function begins. */

KILN double kiln_max_f64(double a, double b) {
    double tied = kiln_double(kiln_double_bits(a) & kiln_double_bits(b));
    double y = a == b ? tied : a > b ? a : b;
    return a != a || b != b ? kiln_double(0x7ff8000000000000ull) : y;
}

KILN double kiln_min_f64(double a, double b) {
    double tied = kiln_double(kiln_double_bits(a) | kiln_double_bits(b));
    double y = a == b ? tied : a < b ? a : b;
    return a != a || b != b ? kiln_double(0x7ff8000000000000ull) : y;
}

KILN float kiln_bf16_to_f32(unsigned short x) { return kiln_float((unsigned int)x << 16); }
KILN float kiln_round_f16(float x) { return kiln_f16_to_f32(kiln_f32_to_f16(x)); }
KILN float kiln_round_bf16(float x) { return kiln_bf16_to_f32(kiln_f32_to_bf16(x)); }

/* Integer quotients and powers. The quotient of the smallest number by -1 wraps. */
#define KILN_INTEGER(T, U, NAME)                                                                                       \
    KILN T kiln_fmod_##NAME(T a, T b) { return b == 0 || b == (T)-1 && (T)-1 < 0 ? (T)0 : (T)(a % b); }                \
    KILN T kiln_remainder_##NAME(T a, T b) {                                                                           \
        T rest = kiln_fmod_##NAME(a, b);                                                                               \
        return rest != 0 && (rest < 0) != (b < 0) ? (T)(rest + b) : rest;                                              \
    }                                                                                                                  \
    KILN T kiln_floor_divide_##NAME(T a, T b) {                                                                        \
        if (b == 0) return 0;                                                                                          \
        if (b == (T)-1 && (T)-1 < 0) return (T)((U)0 - (U)a);                                                          \
        T quotient = (T)(a / b), rest = (T)(a % b);                                                                    \
        return rest != 0 && (rest < 0) != (b < 0) ? (T)(quotient - 1) : quotient;                                      \
    }                                                                                                                  \
    KILN T kiln_pow_##NAME(T a, T b) {                                                                                 \
        if (b < 0) return a == 1 ? (T)1 : a == (T)-1 ? ((b & 1) == 0 ? (T)1 : (T)-1) : (T)0;                           \
        T out = 1;                                                                                                     \
        for (; b > 0; b = (T)(b >> 1)) {                                                                               \
            if ((b & 1) == 1) out = (T)((U)out * (U)a);                                                                \
            a = (T)((U)a * (U)a);                                                                                      \
        }                                                                                                              \
        return out;                                                                                                    \
    }
KILN_INTEGER(long long, unsigned long long, i64)
KILN_INTEGER(int, unsigned int, i32)
KILN_INTEGER(short, unsigned int, i16)
KILN_INTEGER(signed char, unsigned int, i8)
KILN_INTEGER(unsigned long long, unsigned long long, u64)
KILN_INTEGER(unsigned int, unsigned int, u32)
KILN_INTEGER(unsigned short, unsigned int, u16)
KILN_INTEGER(unsigned char, unsigned int, u8)
#undef KILN_INTEGER

/* Floats to integers: toward 0, to the nearest that there is, NaN to 0. TOP is the first number that is too large. */
#define KILN_TO_INTEGER(T, NAME, BOTTOM, TOP, LEAST, MOST)                                                             \
    KILN T kiln_f32_to_##NAME(float x) { return x >= TOP##f ? MOST : x > BOTTOM##f ? (T)x : x == x ? LEAST : (T)0; }   \
    KILN T kiln_f64_to_##NAME(double x) { return x >= TOP ? MOST : x > BOTTOM ? (T)x : x == x ? LEAST : (T)0; }
KILN_TO_INTEGER(long long, i64, -9223372036854775808.0, 9223372036854775808.0, (long long)0x8000000000000000ull, 0x7fffffffffffffffll)
KILN_TO_INTEGER(int, i32, -2147483648.0, 2147483648.0, (int)0x80000000u, 0x7fffffff)
KILN_TO_INTEGER(short, i16, -32768.0, 32768.0, -32768, 32767)
KILN_TO_INTEGER(signed char, i8, -128.0, 128.0, -128, 127)
KILN_TO_INTEGER(unsigned long long, u64, 0.0, 18446744073709551616.0, 0, 0xffffffffffffffffull)
KILN_TO_INTEGER(unsigned int, u32, 0.0, 4294967296.0, 0, 0xffffffffu)
KILN_TO_INTEGER(unsigned short, u16, 0.0, 65536.0, 0, 0xffff)
KILN_TO_INTEGER(unsigned char, u8, 0.0, 256.0, 0, 0xff)
#undef KILN_TO_INTEGER

/* Philox 4x32-10. */
typedef struct { unsigned int at[4]; } kiln_words;

KILN kiln_words kiln_philox(unsigned long long key, unsigned long long offset, unsigned long long block) {
    unsigned int k0 = (unsigned int)key, k1 = (unsigned int)(key >> 32);
    unsigned int c0 = (unsigned int)block, c1 = (unsigned int)(block >> 32);
    unsigned int c2 = (unsigned int)offset, c3 = (unsigned int)(offset >> 32);
    for (int round = 0; round < 10; round++) {
        unsigned long long p0 = (unsigned long long)c0 * 0xd2511f53ull, p1 = (unsigned long long)c2 * 0xcd9e8d57ull;
        c0 = (unsigned int)(p1 >> 32) ^ c1 ^ k0;
        c1 = (unsigned int)p1;
        c2 = (unsigned int)(p0 >> 32) ^ c3 ^ k1;
        c3 = (unsigned int)p0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    kiln_words words = {{c0, c1, c2, c3}};
    return words;
}

KILN unsigned int kiln_word(unsigned long long key, unsigned long long offset, unsigned long long i) {
    kiln_words words = kiln_philox(key, offset, i / 4);
    unsigned int low = i % 2 == 0 ? words.at[0] : words.at[1], high = i % 2 == 0 ? words.at[2] : words.at[3];
    return i % 4 < 2 ? low : high;
}

KILN unsigned long long kiln_wide(unsigned long long key, unsigned long long offset, unsigned long long i) {
    kiln_words words = kiln_philox(key, offset, i / 2);
    unsigned int low = i % 2 == 0 ? words.at[0] : words.at[2], high = i % 2 == 0 ? words.at[1] : words.at[3];
    return (unsigned long long)low | (unsigned long long)high << 32;
}

/* As many high bits as the significand holds. Products by powers of two are exact. */
#define KILN_UNIFORM(T, NAME, DRAW, DROP, SCALE)                                                                       \
    KILN T kiln_uniform_##NAME(unsigned long long key, unsigned long long offset, unsigned long long i) {              \
        return (T)(DRAW(key, offset, i) >> DROP) * (T)SCALE;                                                           \
    }
KILN_UNIFORM(double, f64, kiln_wide, 11, 1.1102230246251565e-16)
KILN_UNIFORM(float, f32, kiln_word, 8, 5.9604644775390625e-8)
KILN_UNIFORM(float, f16, kiln_word, 21, 0.00048828125)
KILN_UNIFORM(float, bf16, kiln_word, 24, 0.00390625)
#undef KILN_UNIFORM

/* By Box and Muller. */
KILN double kiln_normal(unsigned long long key, unsigned long long offset, unsigned long long i) {
    unsigned long long words = kiln_wide(key, offset, i);
    double u1 = ((double)(unsigned int)words + 1.0) * 2.3283064365386963e-10;
    double u2 = (double)(words >> 32) * 2.3283064365386963e-10;
    return sqrt(-2.0 * log(u1)) * cos(6.283185307179586 * u2);
}

