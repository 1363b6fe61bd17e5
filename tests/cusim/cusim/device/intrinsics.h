// Intrinsics: bit casts, bit counts, fast arithmetic (as exact as the host's), min and max.
#pragma once

template <class To, class From>
inline To cusim_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}
inline int __float_as_int(float x) { return cusim_bits<int>(x); }
inline float __int_as_float(int x) { return cusim_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return cusim_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return cusim_bits<float>(x); }
inline long long __double_as_longlong(double x) { return cusim_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cusim_bits<double>(x); }
inline int __double2hiint(double x) { return (int)(cusim_bits<unsigned long long>(x) >> 32); }
inline int __double2loint(double x) { return (int)cusim_bits<unsigned long long>(x); }
inline double __hiloint2double(int high, int low) {
  return cusim_bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

template <class T>
inline T __ldg(const T *pointer) {
  return *pointer;
}

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline double exp10(double x) { return pow(10., x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double x) { return sqrt(x); }

using std::abs;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

template <class A, class B>
using cusim_common = typename std::enable_if<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value,
                                             typename std::common_type<A, B>::type>::type;
template <class A, class B, class C = cusim_common<A, B>>
inline C min(A a, B b) {
  if (std::is_floating_point<C>::value) return (C)::fmin((double)a, (double)b);
  return (C)a < (C)b ? (C)a : (C)b;
}
template <class A, class B, class C = cusim_common<A, B>>
inline C max(A a, B b) {
  if (std::is_floating_point<C>::value) return (C)::fmax((double)a, (double)b);
  return (C)a > (C)b ? (C)a : (C)b;
}
