// float32 <-> bfloat16 and float16, without branches so that loops over them become vectors. Bit arithmetic, not
// `_Float16`: the type is missing from C++ in GCC before 13. Rounding is to nearest, ties to even; NaN stays NaN
// (quiet, sign kept, payload dropped), infinities, subnormals and overflow are those of IEEE 754.
//
// `high` and `low` work on the half that stands in the upper or lower 16 bits of a word, and leave it there. A loop
// that takes two neighbours as one word needs no shuffles to widen and pack them, which would cost it a third of its
// speed.
#pragma once

#include <cstdint>
#include <cstring>

#include "compiler.h"

namespace zerort {

ZERORT_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

ZERORT_INLINE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct BFloat16 {
  static ZERORT_INLINE float widen_low(std::uint32_t word) { return float_of(word << 16); }
  static ZERORT_INLINE float widen_high(std::uint32_t word) { return float_of(word & 0xffff0000u); }

  // The result stands in the upper half; the lower half is rubbish.
  static ZERORT_INLINE std::uint32_t rounded(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
    // The rounding addition would carry a NaN such as 0x7fffffff into -0, and 0x7f800001 into infinity.
    return value != value ? (bits & 0x80000000u) | 0x7fc00000u : nearest;
  }
  static ZERORT_INLINE std::uint32_t narrow_low(float value) { return rounded(value) >> 16; }
  static ZERORT_INLINE std::uint32_t narrow_high(float value) { return rounded(value) & 0xffff0000u; }
};

struct Float16 {
  // From the sign at bit 31 (other bits clear) and the magnitude moved to where float32 has its exponent.
  static ZERORT_INLINE float assembled(std::uint32_t sign, std::uint32_t magnitude) {
    const std::uint32_t normal = magnitude + ((127u - 15u) << 23);
    // A subnormal: give it the exponent of 2^-14 and an implicit one, then let a subtraction take that one away.
    const std::uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
    const std::uint32_t special = magnitude + ((255u - 31u) << 23);  // infinity and NaN: the largest exponent again
    const std::uint32_t finite = magnitude < (1u << 23) ? subnormal : normal;
    return float_of(sign | (magnitude >= (31u << 23) ? special : finite));
  }
  static ZERORT_INLINE float widen_low(std::uint32_t word) {
    return assembled((word << 16) & 0x80000000u, (word & 0x7fffu) << 13);
  }
  static ZERORT_INLINE float widen_high(std::uint32_t word) {
    return assembled(word & 0x80000000u, (word & 0x7fff0000u) >> 3);
  }

  static ZERORT_INLINE std::uint32_t narrow_low(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14: adding this power of two makes the FPU round at the last bit of a float16 subnormal.
    constexpr std::uint32_t aligner = ((127u - 15u) + (23u - 10u) + 1u) << 23;
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + float_of(aligner)) - aligner;
    // Normal: rebias the exponent and round; a carry out of the mantissa reaches the exponent, 65520 becomes infinity.
    const std::uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const std::uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    return ((bits >> 16) & 0x8000u) | (magnitude >= (143u << 23) ? special : finite);
  }
  static ZERORT_INLINE std::uint32_t narrow_high(float value) { return narrow_low(value) << 16; }
};

}  // namespace zerort
