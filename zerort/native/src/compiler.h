// What the kernels ask of the compiler, spelled once: runtime dispatch, inlining, independence of loop turns.
#pragma once

#include <cstddef>  // defines __GLIBC__ on glibc systems

// One source, three machine codes, chosen when the module is loaded (an ifunc, so glibc only): AVX-512, AVX2, SSE2.
// GCC before 12 does not know the x86-64 levels by name; it takes single features. Elsewhere the plain code must do.
// To test one of the codes, define this from outside: -DZERORT_CLONES= is the plain one.
#if !defined(ZERORT_CLONES) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __has_attribute(target_clones)
#if __GNUC__ >= 12
#define ZERORT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ZERORT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#endif
#ifndef ZERORT_CLONES
#define ZERORT_CLONES
#endif

// A body that a clone calls must be inlined into it: compiled on its own it would be SSE2 code in every clone.
#define ZERORT_INLINE inline __attribute__((always_inline))
#define ZERORT_INLINE_LAMBDA __attribute__((always_inline))

// Turn i of the loop touches element i only. Without this the compiler guards the vector loop with an overlap check
// that an in-place call (out is a source) fails, and the scalar loop would run. `__restrict` would be a lie in that
// case.
#if defined(__clang__)
#define ZERORT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define ZERORT_INDEPENDENT _Pragma("GCC ivdep")
#else
#define ZERORT_INDEPENDENT
#endif
