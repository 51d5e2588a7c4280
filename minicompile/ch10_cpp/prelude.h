// Included (as text) at the top of every generated C++ file, but for the sections (from one line with four dashes to the next) that the
// kernels do not need: those in which no name is declared that they use (`build.py`). So what a section declares stands at the beginning
// of a line there, whole. No other header is included: each #include of the standard library costs more compile time than a kernel does.
//
// Everything below a loop must be *branch-free* to vectorise: a choice is a ?: on two computed values, and a
// special case is a select at the end. The scalar functions of libm are calls into a library, one element at
// a time, which is why exp, log, tanh, erf and their friends are written out here for float. Each is a
// range reduction to a small interval and a polynomial; the coefficients are minimax fits (relative error
// below 1e-8, so rounding dominates) and results are within 2.5 ulp of the true value. The rest of libm, and all
// of it for double, glibc has for whole vectors as well, within 4 ulp: see `MC_LIBM`.

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#define MC static inline __attribute__((always_inline))
#define MC_INF __builtin_inff()
#define MC_NAN __builtin_nanf("")
#define MC_FMA __builtin_fmaf
extern "C" int omp_in_parallel();
template <class To, class From> MC To mc_bits(From x) { return __builtin_bit_cast(To, x); }

// ---- functions of libm, which glibc (2.35 and later) has for vectors of each width as well: declared `simd`, g++ calls in a
// loop the one for its width, narrower ones for what is left over at its end, and that for one element in a loop that it cannot
// make vectors of. They differ in the last bits, and a value that two loops compute must be the same in both: `q == q.amax()`
// holds somewhere. So ours for each width spread what they are given over the widest vector and go on as glibc's for that one.
// The linker leaves out those that a file does not call.
#if defined(__x86_64__) && !defined(__clang__) && MC_GLIBC >= 235 && defined(__AVX2__)
#define MC_LIBM(T, name, ...) extern "C" __attribute__((simd("notinbranch"), const)) T name(__VA_ARGS__) __asm__("mc_libm_" #name);
#define MC_LIBM1(name) MC_LIBM(double, name, double) MC_LIBM(float, name##f, float)
#define MC_LIBM2(name) MC_LIBM(double, name, double, double) MC_LIBM(float, name##f, float, float)
asm(R"(
.macro mc_goto from, to, first, second
  .pushsection .text.\from, "ax"
  \from: \first
  \second
  jmp \to@PLT
  .popsection
.endm
.macro mc_widths name, v, s, two, four, eight
)"
#ifdef __AVX512F__
R"(
  mc_goto mc_libm_\name, _ZGVeN\eight\v\()_\name, "vbroadcast\s %xmm0, %zmm0", "vbroadcast\s %xmm1, %zmm1"
  mc_goto _ZGVbN\two\v\()_mc_libm_\name, _ZGVeN\eight\v\()_\name, "vshuff64x2 $0, %zmm0, %zmm0, %zmm0", "vshuff64x2 $0, %zmm1, %zmm1, %zmm1"
  mc_goto _ZGVdN\four\v\()_mc_libm_\name, _ZGVeN\eight\v\()_\name, "vshuff64x2 $68, %zmm0, %zmm0, %zmm0", "vshuff64x2 $68, %zmm1, %zmm1, %zmm1"
  mc_goto _ZGVeN\eight\v\()_mc_libm_\name, _ZGVeN\eight\v\()_\name
)"
#else
R"(
  mc_goto mc_libm_\name, _ZGVdN\four\v\()_\name, "vbroadcast\s %xmm0, %ymm0", "vbroadcast\s %xmm1, %ymm1"
  mc_goto _ZGVbN\two\v\()_mc_libm_\name, _ZGVdN\four\v\()_\name, "vinsertf128 $1, %xmm0, %ymm0, %ymm0", "vinsertf128 $1, %xmm1, %ymm1, %ymm1"
  mc_goto _ZGVdN\four\v\()_mc_libm_\name, _ZGVdN\four\v\()_\name
)"
#endif
R"(
.endm
.irp name, exp, exp2, expm1, log, log2, log10, log1p, sin, cos, tan, asin, acos, atan, sinh, cosh, tanh, asinh, acosh, atanh, erf, erfc
  mc_widths \name, v, sd, 2, 4, 8
  mc_widths \name\()f, v, ss, 4, 8, 16
.endr
.irp name, pow, atan2, hypot
  mc_widths \name, vv, sd, 2, 4, 8
  mc_widths \name\()f, vv, ss, 4, 8, 16
.endr
)");
MC_LIBM1(exp) MC_LIBM1(exp2) MC_LIBM1(expm1) MC_LIBM1(log) MC_LIBM1(log2) MC_LIBM1(log10) MC_LIBM1(log1p)
MC_LIBM1(tan) MC_LIBM1(asin) MC_LIBM1(acos) MC_LIBM1(atan)
MC_LIBM1(sinh) MC_LIBM1(cosh) MC_LIBM1(tanh) MC_LIBM1(asinh) MC_LIBM1(acosh) MC_LIBM1(atanh)
MC_LIBM1(erf) MC_LIBM1(erfc) MC_LIBM2(pow) MC_LIBM2(atan2) MC_LIBM2(hypot)
// under names that g++ does not know: it would make one call of the sine and the cosine of a number, for which there is no vector
#define MC_SIN(name) mc_libm_##name
#define MC_ALONE(T, name) extern "C" __attribute__((simd("notinbranch"), const)) T MC_SIN(name)(T);
MC_ALONE(double, sin) MC_ALONE(double, cos) MC_ALONE(float, sinf) MC_ALONE(float, cosf)
#else
#define MC_SIN(name) __builtin_##name
#endif
MC double mc_sin(double x) { return MC_SIN(sin)(x); }
MC double mc_cos(double x) { return MC_SIN(cos)(x); }
MC float mc_sin(float x) { return MC_SIN(sinf)(x); }
MC float mc_cos(float x) { return MC_SIN(cosf)(x); }

// ---- lists of kernels: `first` block of each piece, and the piece of a block
MC int64_t mc_blocks(int64_t pieces, const int64_t* end, const int64_t* length, int64_t* first) {
  first[0] = 0;
  for (int64_t i = 0; i < pieces; i++) first[i + 1] = first[i] + (end[i] + length[i] - 1) / length[i];
  return first[pieces];
}
MC int64_t mc_piece(int64_t pieces, const int64_t* first, int64_t block) {
  int64_t low = 0, high = pieces;  // first[low] <= block < first[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (first[middle] <= block) low = middle; else high = middle;
  }
  return low;
}

// ---- `a` where all bits of `all` are set, `b` where none is
template <int bytes> struct mc_int;
template <> struct mc_int<1> { typedef int8_t type; };
template <> struct mc_int<2> { typedef int16_t type; };
template <> struct mc_int<4> { typedef int32_t type; };
template <> struct mc_int<8> { typedef int64_t type; };
template <class T> MC T mc_choose(int64_t all, T a, T b) {
  typedef typename mc_int<sizeof(T)>::type I;
  return mc_bits<T>((I)((mc_bits<I>(a) & (I)all) | (mc_bits<I>(b) & ~(I)all)));
}

// ---- half precision in memory, float in registers
MC float mc_from_bf16(uint16_t h) { return mc_bits<float>((uint32_t)h << 16); }
MC uint16_t mc_to_bf16(float x) {  // round to nearest, ties to even; a NaN stays one
  const uint32_t u = mc_bits<uint32_t>(x);
  const uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)(x != x ? 0x7fc0u : r);
}
// fp16: shift into a float's fields and correct the exponent's bias. No float on the way is subnormal: torch.set_flush_denormal
// would make it 0
MC float mc_from_fp16(uint16_t h) {
  const int32_t u = (h & 0x7fff) << 13, f = u + (u >= 0x0f800000 ? 0x70000000 : 0x38000000);
  const int32_t small = mc_bits<int32_t>(mc_bits<float>(u + 0x38800000) - 6.103515625e-05f);
  return mc_bits<float>((u < 0x00800000 ? small : f) | (int32_t)((uint32_t)(h & 0x8000) << 16));
}
// the sum with 2^13 times its power of two (at least 2^-14) leaves the bits that fp16 has, rounded; 2^16 is infinite
MC uint16_t mc_to_fp16(float x) {
  const float a = __builtin_fabsf(x), b = 65536.0f < a ? 65536.0f : a;
  const int32_t power = mc_bits<int32_t>(b) & 0x7f800000, e = power > 0x38800000 ? power : 0x38800000, top = e + (13 << 23);
  const int32_t h = mc_bits<int32_t>(b + mc_bits<float>(top)) - top + ((e - 0x38800000) >> 13);
  return (uint16_t)((mc_bits<uint32_t>(x) >> 16 & 0x8000u) | (x != x ? 0x7e00 : h));
}
// its value as a float again: less the same number, which is 1.5 times 2^13 times the power of two, so that x may be negative, and
// keeps its sign. Scaled by 2^112, what is too large becomes infinite
MC float mc_round_fp16(float x) {
  const int32_t power = mc_bits<int32_t>(x) & 0x7f800000, e = power > 0x38800000 ? power : 0x38800000;
  const float top = mc_bits<float>((e < 0x47800000 ? e : 0x47800000) + (13 << 23) + (1 << 22)), h = x + top - top;
  return mc_bits<float>(mc_bits<int32_t>(h * 0x1p112f * 0x1p-112f) | (mc_bits<int32_t>(x) & (1 << 31)));
}

// ---- sixteen halves at once (n = 16, a constant), or the last few of a row
#if defined(__AVX512BW__) || defined(__F16C__) && defined(__AVX2__)
#ifdef __AVX512BW__
#define MC_WIDTH 16
#define MC_FROM_FP16(h) __builtin_ia32_vcvtph2ps512_mask(h, mc_floats(), -1, 4)
#define MC_TO_FP16(x) __builtin_ia32_vcvtps2ph512_mask(x, 0, mc_halves(), -1)
#else
#define MC_WIDTH 8
#define MC_FROM_FP16(h) __builtin_ia32_vcvtph2ps256(h)
#define MC_TO_FP16(x) __builtin_ia32_vcvtps2ph256(x, 0)
#endif
#if defined(__AVX512BW__) && !defined(__clang__)  // g++ makes of a conversion of vectors two, of halves of them
#define MC_WORDS(h) (mc_words)__builtin_ia32_pmovzxwd512_mask((mc_halves)(h), (mc_integers)mc_words(), -1)
#define MC_SHORTS(w) (mc_shorts)__builtin_ia32_pmovdw512_mask((mc_integers)(w), mc_halves(), -1)
#elif !defined(__clang__)
#define MC_WORDS(h) (mc_words)__builtin_ia32_pmovzxwd256((mc_halves)(h))
#else
#define MC_WORDS(h) __builtin_convertvector(h, mc_words)
#define MC_SHORTS(w) __builtin_convertvector(w, mc_shorts)
#endif
typedef short mc_halves __attribute__((vector_size(2 * MC_WIDTH), aligned(2)));
typedef uint16_t mc_shorts __attribute__((vector_size(2 * MC_WIDTH), aligned(2)));
typedef float mc_floats __attribute__((vector_size(4 * MC_WIDTH), aligned(4)));
typedef uint32_t mc_words __attribute__((vector_size(4 * MC_WIDTH), aligned(4)));
typedef int32_t mc_integers __attribute__((vector_size(4 * MC_WIDTH), aligned(4)));
MC mc_floats mc_floats_fp16(mc_shorts h) { return MC_FROM_FP16((mc_halves)h); }
MC mc_shorts mc_shorts_fp16(mc_floats x) { return (mc_shorts)MC_TO_FP16(x); }
MC mc_floats mc_floats_bf16(mc_shorts h) { return (mc_floats)(MC_WORDS(h) << 16); }
MC mc_words mc_words_bf16(mc_floats x) {  // the words that MC_PACKED makes halves of
  const mc_words u = (mc_words)x, r = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  return (mc_words)(x != x ? mc_words() + 0x7fc0u : r);
}
MC mc_words mc_words_cut(mc_floats x) { return (mc_words)x >> 16; }
#if defined(__AVX512BF16__) && MC_WIDTH == 16 && !defined(__clang__)  // the instruction makes 0 of what is subnormal (0x20)
#define MC_INSTRUCTION_BF16
MC mc_shorts mc_shorts_bf16(mc_floats x) {
  if (__builtin_expect(__builtin_ia32_fpclassps512_mask(x, 0x20, -1) != 0, 0)) return MC_SHORTS(mc_words_bf16(x));
  return (mc_shorts)__builtin_ia32_cvtneps2bf16_v16sf(x);
}
#endif
#define MC_SIXTEEN(one, many, to_type, from_type)                         \
  _Pragma("GCC unroll 2") for (int64_t i = 0; i < 16; i += MC_WIDTH)      \
    *(to_type*)(to + i) = many(*(const from_type*)(from + i))
#ifdef MC_SHORTS
#define MC_PACKED(one, many, to_type, from_type)                          \
  _Pragma("GCC unroll 2") for (int64_t i = 0; i < 16; i += MC_WIDTH)      \
    *(mc_shorts*)(to + i) = MC_SHORTS(many(*(const from_type*)(from + i)))
#else
typedef int64_t mc_pairs __attribute__((vector_size(32), aligned(2)));
MC void mc_pack(uint16_t* to, mc_words a, mc_words b) {  // by halves of each: in the order 0, 2, 1, 3 of four pieces
  const mc_pairs mixed = (mc_pairs)__builtin_ia32_packusdw256((mc_integers)a, (mc_integers)b);
  *(mc_pairs*)to = __builtin_shuffle(mixed, mc_pairs{0, 2, 1, 3});
}
#define MC_PACKED(one, many, to_type, from_type) mc_pack(to, many(*(const from_type*)from), many(*(const from_type*)(from + 8)))
#endif
#else
#define MC_SIXTEEN(one, many, to_type, from_type)                         \
  _Pragma("omp simd") for (int64_t i = 0; i < 16; i++) to[i] = one(from[i])
#define MC_PACKED MC_SIXTEEN
#endif
MC uint16_t mc_to_cut(float x) { return (uint16_t)(mc_bits<uint32_t>(x) >> 16); }  // bf16, where there is nothing to round
// the last n of a row: `whole` says that what is to be stored lies in a whole vector
#if defined(__AVX512BW__) && !defined(__clang__)
#define MC_MASK(n) (uint16_t)((1u << (n)) - 1)
// (by instructions for 64 bytes, since those for fewer are switched off: see build.py)
typedef short mc_all_halves __attribute__((vector_size(64), aligned(2)));
typedef char mc_all_chars __attribute__((vector_size(64), aligned(1)));
typedef int32_t mc_4 __attribute__((vector_size(16), aligned(1)));
typedef int32_t mc_8 __attribute__((vector_size(32), aligned(1)));
#define MC_FIRST(v) __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define MC_LOAD_FEW(from) (mc_shorts)MC_FIRST(__builtin_ia32_loaddquhi512_mask((const short*)(from), mc_all_halves(), MC_MASK(n)))
#define MC_STORE_FEW(to, h) __builtin_ia32_storedquhi512_mask((short*)(to), (mc_all_halves)__builtin_ia32_si512_256si((mc_8)(h)), MC_MASK(n))
#define MC_PART_IN(many) if (n != 16) { *(mc_floats*)to = many(MC_LOAD_FEW(from)); return; }
#define MC_PART_OUT(many) if (n != 16 && whole) { MC_STORE_FEW(to, many(*(const mc_floats*)from)); return; }
#define MC_PART_PACKED(many) if (n != 16 && whole) { MC_STORE_FEW(to, MC_SHORTS(many(*(const mc_floats*)from))); return; }
MC void mc_widen_f32(float* to, const float* from, int64_t n) {
  *(mc_floats*)to = n == 16 ? *(const mc_floats*)from : (mc_floats)__builtin_ia32_loadups512_mask(from, mc_floats(), MC_MASK(n));
}
MC void mc_narrow_f32(float* to, const float* from, int64_t n, bool whole = false) {
  if (n == 16) *(mc_floats*)to = *(const mc_floats*)from;
  else __builtin_ia32_storeups512_mask(to, *(const mc_floats*)from, MC_MASK(n));
}
MC void mc_there(int32_t* there, int64_t n) {
  *(mc_integers*)there = (mc_integers)__builtin_ia32_movdqa32_512_mask(mc_integers() - 1, mc_integers(), MC_MASK(n));
}
#else
MC void mc_there(int32_t* there, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < 16; i++) there[i] = i < n ? -1 : 0;
}
#define MC_PART_IN(many)
#define MC_PART_OUT(many)
#define MC_PART_PACKED(many)
MC void mc_widen_f32(float* to, const float* from, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < 16; i++) to[i] = i < n ? from[i] : 0;
}
MC void mc_narrow_f32(float* to, const float* from, int64_t n, bool whole = false) {
#pragma omp simd
  for (int64_t i = 0; i < 16; i++) if (i < n) to[i] = from[i];
}
#endif
MC constexpr int64_t mc_lanes(int64_t n) { return (n + 15) / 16 * 16; }  // of the steps for n numbers
// few: the function of less than sixteen elements; one: of one; from, to: an element, and the vectors of them; part: of less than a vector
#define MC_CONVERT(name, few, one, many, from_one, from_many, to_one, to_many, sixteen, part)                        \
  static __attribute__((noinline)) void few(to_one* to, const from_one* from, int64_t n) {                           \
    for (int64_t i = 0; i < n; i++) to[i] = one(from[i]);                                                            \
  }                                                                                                                  \
  MC void name(to_one* to, const from_one* from, int64_t n, bool whole = false) {                                    \
    part(many)                                                                                                       \
    if (__builtin_constant_p(n) && n <= 4) {                                                                         \
      for (int64_t i = 0; i < n; i++) to[i] = one(from[i]);                                                          \
      return;                                                                                                        \
    }                                                                                                                \
    if (n != 16) return few(to, from, n);                                                                            \
    sixteen(one, many, to_many, from_many);                                                                          \
  }
#define MC_WIDEN(name, few, one, many) MC_CONVERT(name, few, one, many, uint16_t, mc_shorts, float, mc_floats, MC_SIXTEEN, MC_PART_IN)
#define MC_NARROW(name, few, one, many, to_many, sixteen, part) \
  MC_CONVERT(name, few, one, many, float, mc_floats, uint16_t, to_many, sixteen, part)
MC_WIDEN(mc_widen_fp16, mc_widen_few_fp16, mc_from_fp16, mc_floats_fp16)
MC_WIDEN(mc_widen_bf16, mc_widen_few_bf16, mc_from_bf16, mc_floats_bf16)
MC_NARROW(mc_narrow_fp16, mc_narrow_few_fp16, mc_to_fp16, mc_shorts_fp16, mc_shorts, MC_SIXTEEN, MC_PART_OUT)
#ifdef MC_INSTRUCTION_BF16
MC_NARROW(mc_narrow_bf16, mc_narrow_few_bf16, mc_to_bf16, mc_shorts_bf16, mc_shorts, MC_SIXTEEN, MC_PART_OUT)
#else
MC_NARROW(mc_narrow_bf16, mc_narrow_few_bf16, mc_to_bf16, mc_words_bf16, mc_words, MC_PACKED, MC_PART_PACKED)
#endif
MC_NARROW(mc_narrow_cut, mc_narrow_few_cut, mc_to_cut, mc_words_cut, mc_words, MC_PACKED, MC_PART_PACKED)
#ifdef MC_MASK  // bytes to and from integers
typedef char mc_chars __attribute__((vector_size(16), aligned(1)));
#define MC_WIDE(kind) {                                                                                            \
    const mc_chars some = (mc_chars)MC_FIRST(__builtin_ia32_loaddquqi512_mask((const char*)from, mc_all_chars(), MC_MASK(n))); \
    const mc_chars c = n == 16 ? *(const mc_chars*)from : some;                                                    \
    *(mc_integers*)to = (mc_integers)__builtin_ia32_pmov##kind##512_mask(c, mc_integers(), -1);                    \
    return;                                                                                                        \
  }
#define MC_SLIM if (n == 16 || whole) {                                                                            \
    const mc_chars c = (mc_chars)__builtin_ia32_pmovdb512_mask(*(const mc_integers*)from, mc_chars(), -1);         \
    if (n == 16) *(mc_chars*)to = c;                                                                               \
    else __builtin_ia32_storedquqi512_mask((char*)to, (mc_all_chars)__builtin_ia32_si512_si((mc_4)c), MC_MASK(n)); \
    return;                                                                                                        \
  }
#elif defined(MC_WIDTH) && !defined(__clang__)  // g++ would store four at a time what is then loaded by eights, and waits for that
typedef char mc_chars __attribute__((vector_size(16), aligned(1)));
#define MC_WIDE(kind)                                                                             \
  if (n == 16) {                                                                                  \
    const mc_chars c = *(const mc_chars*)from, d = __builtin_shuffle(c, mc_chars{8, 9, 10, 11, 12, 13, 14, 15}); \
    *(mc_integers*)to = (mc_integers)__builtin_ia32_pmov##kind##256(c);                           \
    *(mc_integers*)(to + 8) = (mc_integers)__builtin_ia32_pmov##kind##256(d);                     \
    return;                                                                                       \
  }
#define MC_SLIM
#else
#define MC_WIDE(kind)
#define MC_SLIM
#endif
#define MC_BYTES(type, widen, narrow, kind)                                                                    \
  MC void widen(int32_t* to, const type* from, int64_t n) { MC_WIDE(kind) for (int64_t i = 0; i < n; i++) to[i] = from[i]; } \
  MC void narrow(type* to, const int32_t* from, int64_t n, bool whole = false) {                               \
    MC_SLIM for (int64_t i = 0; i < n; i++) to[i] = (type)from[i];                                             \
  }
MC_BYTES(uint8_t, mc_widen_u8, mc_narrow_u8, zxbd)
MC_BYTES(int8_t, mc_widen_i8, mc_narrow_i8, sxbd)

// ---- exponentials: x = n*ln2 + r, |r| <= ln2/2, and e^r = 1 + r + r^2 P(r)
MC float mc_clamp(float x, float lo, float hi) { x = x < lo ? lo : x; return x > hi ? hi : x; }  // NaN passes
MC float mc_exp_poly(float r) {
  float p = MC_FMA(0.0013947595f, r, 0.008367247f);
  p = MC_FMA(p, r, 0.041666266f);
  p = MC_FMA(p, r, 0.16666538f);
  return MC_FMA(p, r, 0.5f);
}
MC float mc_exp_reduced(float r) { return MC_FMA(MC_FMA(mc_exp_poly(r), r, 1.0f), r, 1.0f); }
MC float mc_expm1_reduced(float r) { return MC_FMA(mc_exp_poly(r) * r, r, r); }
MC float mc_exp2_reduced(float f) {  // 2^f, |f| <= 1/2
  float p = MC_FMA(0.000153533620f, f, 0.00133988750f);
  p = MC_FMA(p, f, 0.00961843692f);
  p = MC_FMA(p, f, 0.0555033237f);
  p = MC_FMA(p, f, 0.240226477f);
  p = MC_FMA(p, f, 0.693147182f);
  return MC_FMA(p, f, 1.0f);
}
// n = rint(x) of a small x without a conversion: in x + 1.5 * 2^23 + bias the last bits are those of n + bias
#define MC_ROUND(bias) (12582912.0f + (bias))
MC float mc_reduce_ln2(float x, float bias, uint32_t* bits) {  // r, and n + bias in the last bits
  const float m = MC_FMA(x, 1.44269504f, MC_ROUND(bias)), n = m - MC_ROUND(bias);
  *bits = mc_bits<uint32_t>(m);
  return MC_FMA(n, 1.90465434e-9f, MC_FMA(n, -0.693147182f, x));
}
MC float mc_pow2(uint32_t bits) { return mc_bits<float>(bits << 23); }  // bits: n + 127, of a result that is neither subnormal nor infinite
// x * 2^n of n + 254, in two factors: the result may be subnormal or overflow. One that is too small even for that costs the processor
// a hundred cycles, unless a factor is 0, as for n = -254: a masked softmax took three times as long
MC float mc_scaled(float x, uint32_t bits) {
  const uint32_t half = bits << 22 & 0xff800000u;
  return x * mc_bits<float>(half) * mc_bits<float>((bits << 23) - half);
}
MC float mc_exp(float x) {
  uint32_t bits;
  const float r = mc_reduce_ln2(mc_clamp(x, -176.1f, 89.0f), 254.0f, &bits);  // there the first factor is 0
  return mc_scaled(mc_exp_reduced(r), bits);
}
MC float mc_exp_moderate(float x) {  // |x| < 80
  uint32_t bits;
  const float r = mc_reduce_ln2(x, 127.0f, &bits);
  return mc_exp_reduced(r) * mc_pow2(bits);
}
MC float mc_expm1(float x) {
  uint32_t bits;
  const float c = mc_clamp(x, -30.0f, 89.0f), p = mc_expm1_reduced(mc_reduce_ln2(c, 126.0f, &bits)), h = mc_pow2(bits);
  const float y = 2.0f * MC_FMA(h, p, h - 0.5f);
  return h == 0.5f ? (x == 0.0f ? x : p) : y;
}
MC float mc_exp2(float x) {
  const float c = mc_clamp(x, -254.0f, 129.0f), m = c + MC_ROUND(254.0f);
  return mc_scaled(mc_exp2_reduced(c - (m - MC_ROUND(254.0f))), mc_bits<uint32_t>(m));
}
MC float mc_exp2_moderate(float x) {  // -127 <= x < 115; of -127, 0
  const float m = x + MC_ROUND(127.0f);
  return mc_exp2_reduced(x - (m - MC_ROUND(127.0f))) * mc_pow2(mc_bits<uint32_t>(m));
}
MC float mc_sigmoid(float x) {  // 1 / (1 + e^-x); 2^-16 e^-x does not overflow
  uint32_t bits;
  const float r = mc_reduce_ln2(mc_clamp(-x, -40.0f, 89.0f), 127.0f - 16.0f, &bits);
  return 1.0f / (1.0f + mc_exp_reduced(r) * mc_pow2(bits) * 65536.0f);
}
MC float mc_tanh(float x) {  // (e^2|x| - 1) / (e^2|x| + 1), exact near zero because e^r - 1 is
  uint32_t bits;
  const float a = __builtin_fabsf(x), p = mc_expm1_reduced(mc_reduce_ln2(2.0f * (a > 10.0f ? 10.0f : a), 127.0f, &bits));
  const float h = mc_pow2(bits), t = MC_FMA(h, p, h - 1.0f);
  return __builtin_copysignf(t / (t + 2.0f), x);
}

// ---- logarithms: x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), and log(1 + f) = f - f^2/2 + f^3 P(f).
// P by pairs of terms: one after another, each operation would wait for the last
MC float mc_log1p_reduced(float f, float e) {
  const float f2 = f * f;
  const float a = MC_FMA(-0.117897987f, f, 0.11873057f), b = MC_FMA(-0.12384357f, f, 0.14218649f);
  const float c = MC_FMA(-0.1666925f, f, 0.20002227f), d = MC_FMA(-0.24999987f, f, 0.3333331f);
  const float p = MC_FMA(MC_FMA(MC_FMA(0.06915181f, f2, a), f2, b), f2 * f2, MC_FMA(c, f2, d));
  const float tail = MC_FMA(p * f, f2, MC_FMA(e, -1.90465434e-9f, -0.5f * f2));
  return MC_FMA(e, 0.693147182f, f + tail);
}
MC float mc_log_special(float x, float y) {
  y = x < MC_INF ? y : x;
  return x > 0.0f ? y : (x == 0.0f ? -MC_INF : MC_NAN);
}
MC float mc_split(float x, float* e) {  // x = 2^e * (1 + result)
  const bool tiny = x < 1.17549435e-38f;
  const int32_t i = mc_bits<int32_t>(tiny ? x * 8388608.0f : x), k = (i - 0x3f3504f3) >> 23;
  *e = (float)(tiny ? k - 23 : k);
  return mc_bits<float>(i - (k << 23)) - 1.0f;
}
MC float mc_log(float x) {
  float e;
  const float f = mc_split(x, &e);
  return mc_log_special(x, mc_log1p_reduced(f, e));
}
MC float mc_log2(float x) {
  float e;
  const float f = mc_split(x, &e), l = mc_log1p_reduced(f, 0.0f);
  return mc_log_special(x, MC_FMA(l, 1.92596303e-8f, MC_FMA(l, 1.44269502f, e)));
}
MC float mc_log10(float x) { return mc_log_special(x, (float)(mc_log(x) * 0.43429448190325182)); }
MC float mc_log1p(float x) {  // log(u) corrected by what rounding u = 1 + x lost
  const float u = 1.0f + x, lost = (x - (u - 1.0f)) / u;
  const float y = mc_log(u) + (u > 0.0f && u < MC_INF ? lost : 0.0f);
  return x == 0.0f ? x : y;
}

// ---- erf: an odd polynomial near zero; 1 - e^Q(|x|) beyond
MC float mc_erf(float x) {
  const float a = __builtin_fabsf(x), s = x * x;
  float p = MC_FMA(-0.00059887528f, s, 0.0049932748f);
  p = MC_FMA(p, s, -0.0267671f);
  p = MC_FMA(p, s, 0.11281844f);
  p = MC_FMA(p, s, -0.37612498f);
  p = MC_FMA(p, s, 0.12837915f);
  const float near = MC_FMA(p, x, x), t = a > 4.0f ? 4.0f : a;
  float q = MC_FMA(-2.0909563e-05f, t, 0.00043230309f);
  q = MC_FMA(q, t, -0.0041605271f);
  q = MC_FMA(q, t, 0.025091497f);
  q = MC_FMA(q, t, -0.10823662f);
  q = MC_FMA(q, t, -0.63338667f);
  q = MC_FMA(q, t, -1.1294951f);
  q = MC_FMA(q, t, 0.00017055213f);
  const float far = __builtin_copysignf(1.0f - mc_exp_moderate(q), x);
  return a < 0.927f ? near : (x != x ? x : far);
}

// ---- 1 + erf(x): 2^(t Q(t)) with t = |x| left of zero (ch08_fusion/values.py, which writes MC_ERF_Q). At 7.8261, where t Q(t) is
// -127, nothing is left of it; of an infinite t the pairs would be inf - inf, a NaN that could not be told from that of a NaN
MC float mc_erf_q(float t, float a, float b, float c, float d, float e, float f, float g, float h) {  // by pairs of terms, as logarithms
  const float t2 = t * t, high = MC_FMA(MC_FMA(a, t, b), t2, MC_FMA(c, t, d));
  return MC_FMA(high, t2 * t2, MC_FMA(MC_FMA(e, t, f), t2, MC_FMA(g, t, h)));
}
MC float mc_erf_plus_one(float x) {
  const float a = __builtin_fabsf(x), t = a > 7.8261f ? 7.8261f : a, left = mc_exp2_moderate(mc_erf_q(t, MC_ERF_Q) * t);  // NaN passes
  return x > 0.0f ? 2.0f - left : left;
}

// ---- floating point to integer: NaN and what does not fit have no answer in C++, and the compiler folds
// `(int)(c ? x : NAN)` to `c ? (int)x : 0`. Eager has what the processor gives: on x86, the lowest number.
// g++ takes `(float)(int)x` for `trunc(x)`, which is -0 of -0.5, so what becomes 0 is 0 before the cast.
#if defined(__x86_64__)
template <class T, class F> MC T mc_integer(F x) {
  const T lowest = (T)((T)1 << (8 * sizeof(T) - 1));
  const bool fits = (x >= (F)lowest) & (x < -(F)lowest);
  const T y = (T)(fits & !((x > (F)-1) & (x <= (F)0)) ? x : (F)0);
  return fits ? y : lowest;
}
#else
template <class T, class F> MC T mc_integer(F x) { return (T)(x > (F)-1 && x <= (F)0 ? (F)0 : x); }
#endif

// ---- int64 to floating point and back. Without AVX-512 no instruction does it for a vector, so g++ would make none of the whole loop.
// What is added to 2^52 stands in the last bits of the double. 2^84, whose last bit counts 2^32, takes the upper half of an integer.
#if defined(__AVX2__) && !defined(__AVX512DQ__)
MC double mc_double(int64_t x) {  // to the upper half 2^31 is added, so that it is not negative
  const double high = mc_bits<double>((uint64_t)x >> 32 ^ 0x4530000080000000u);
  const double low = mc_bits<double>(((uint64_t)x & 0xffffffffu) | 0x4330000000000000u);
  return high - (0x1p84 + 0x1p63 + 0x1p52) + low;
}
MC float mc_float(int64_t x) {  // what a double would round as well has all its last bits, which decide ties only, in one
  const bool large = x + ((1l << 53) + (1l << 63)) > (1l << 54) + (1l << 63);  // than 2^53, on either side: one comparison
  return (float)mc_double(large ? (((x & 2047) + 2047) | x) & ~2047l : x);
}
template <class F> MC int64_t mc_long(F x) {
  const double whole = __builtin_trunc((double)x), high = __builtin_floor(whole * 0x1p-32), low = whole - high * 0x1p32;
  const int64_t upper = mc_bits<int64_t>(high + 0x1.8p52) << 32, lower = mc_bits<int64_t>(low + 0x1p52) - mc_bits<int64_t>(0x1p52);
  return (x >= (F)-0x1p63) & (x < (F)0x1p63) ? upper + lower : (int64_t)1 << 63;
}
template <> inline int64_t mc_integer<int64_t, float>(float x) { return mc_long(x); }
template <> inline int64_t mc_integer<int64_t, double>(double x) { return mc_long(x); }
#else
MC double mc_double(int64_t x) { return (double)x; }
MC float mc_float(int64_t x) { return (float)x; }
#endif

// ---- double goes to libm
#define MC_DOUBLE(name, f) MC double name(double x) { return f(x); }
MC_DOUBLE(mc_exp, __builtin_exp) MC_DOUBLE(mc_exp2, __builtin_exp2) MC_DOUBLE(mc_expm1, __builtin_expm1)
MC_DOUBLE(mc_log, __builtin_log) MC_DOUBLE(mc_log2, __builtin_log2) MC_DOUBLE(mc_log10, __builtin_log10)
MC_DOUBLE(mc_log1p, __builtin_log1p) MC_DOUBLE(mc_tanh, __builtin_tanh) MC_DOUBLE(mc_erf, __builtin_erf)
MC double mc_erf_plus_one(double x) { return 1.0 + __builtin_erf(x); }
MC double mc_sigmoid(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }

// ---- Python's and torch's arithmetic
template <class T> MC T mc_max(T a, T b) { return a > b || a != a ? a : b; }
template <class T> MC T mc_min(T a, T b) { return a < b || a != a ? a : b; }
template <class T> MC T mc_ifloordiv(T a, T b) {
  return (T)(a / b - (((a % b) != 0) & ((a < 0) != (b < 0))));
}
template <class T> MC T mc_imod(T a, T b) {
  const T r = a % b;
  return (T)(r != 0 && ((r < 0) != (b < 0)) ? r + b : r);
}
template <class T> MC T mc_shl(T a, T b) { return b < 0 || b >= (T)(8 * sizeof(T)) ? (T)0 : (T)(a << b); }
template <class T> MC T mc_shr(T a, T b) {
  return b < 0 || b >= (T)(8 * sizeof(T)) ? (T)(a < 0 ? -1 : 0) : (T)(a >> b);
}

// ---- powers: a function for powers of vectors takes each negative base by itself, so that it is given none
MC float mc_pow_positive(float x, float y) { return __builtin_powf(x, y); }
MC double mc_pow_positive(double x, double y) { return __builtin_pow(x, y); }
MC float mc_copysign(float x, float y) { return __builtin_copysignf(x, y); }
MC double mc_copysign(double x, double y) { return __builtin_copysign(x, y); }
MC float mc_trunc(float x) { return __builtin_truncf(x); }
MC double mc_trunc(double x) { return __builtin_trunc(x); }
template <class T> MC T mc_pow(T x, T y) {
  const T a = x <= 0 ? 0 - x : x, r = mc_pow_positive(a, y), half = y * (T)0.5;
  const bool whole = mc_trunc(y) == y, odd = whole & (mc_trunc(half) != half);
  const T value = odd ? mc_copysign(r, x) : r;
  return (x < 0) & !whole & (a < MC_INF) ? (T)MC_NAN : value;
}
template <int n> MC double mc_power(double x) {
  if constexpr (n < 0) return 1.0 / mc_power<-n>(x);
  else if constexpr (n < 2) return n ? x : 1.0;
  else return mc_power<n / 2>(x * x) * mc_power<n % 2>(x);
}
template <class T> MC T mc_ipow(T a, T b) {
  if (b < 0) return a == 1 ? 1 : a == (T)-1 ? ((b & 1) ? (T)-1 : (T)1) : 0;
  T y = 1;
  for (; b; b = (T)(b >> 1)) { if (b & 1) y = (T)(y * a); a = (T)(a * a); }
  return y;
}

// ---- memory for an array whose length varies
struct mc_memory {
  void* begin;
  mc_memory(int64_t count, int64_t size) : begin(__builtin_malloc(count * size)) {}
  ~mc_memory() { __builtin_free(begin); }
};

// ---- a kernel reports the first index out of range, or a division by zero, through `problem`; the caller
// raises
struct mc_problem { int64_t kind, value, size; };  // kind: 1 for an index, 2 for a divisor, 3 for too little memory
static __attribute__((noinline, cold))
void mc_report(mc_problem* p, int64_t kind, int64_t value, int64_t size) {
#pragma omp critical(mc_problem)
  if (!p->kind) { p->value = value; p->size = size; p->kind = kind; }
}
MC int64_t mc_index(int64_t v, int64_t size, mc_problem* p) {
  if (__builtin_expect((uint64_t)v >= (uint64_t)size, 0)) { mc_report(p, 1, v, size); return 0; }
  return v;
}
template <class T> MC T mc_divisor(T b, mc_problem* p) {
  if (__builtin_expect(b == 0, 0)) { mc_report(p, 2, 0, 0); return 1; }
  return b;
}
