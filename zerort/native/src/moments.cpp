#include "moments.h"

#include <algorithm>
#include <cstring>

#include "compiler.h"
#include "half.h"

namespace zerort {
namespace {

constexpr std::uint32_t one = 0x3f800000u, infinity = 0x7f800000u, quiet_nan = 0x7fc00000u;

ZERORT_INLINE std::uint32_t mixed(std::uint32_t h) {
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}

template <bool is_signed>
ZERORT_INLINE void encode_one(std::uint8_t* payload, const float* source, std::size_t count, std::uint32_t low,
                              std::uint32_t key, std::uint32_t key1) {
  constexpr std::int32_t top = is_signed ? 127 : 255;
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(source[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  std::uint8_t* codes = payload + 4;
  const bool is_broken = static_cast<std::uint32_t>(largest) >= infinity;
  const std::uint32_t stored = is_broken ? quiet_nan : static_cast<std::uint32_t>(largest);
  std::memcpy(payload, &stored, 4);
  if (largest == 0 || is_broken) {
    std::memset(codes, 0, count);
    return;
  }
  const float scale = float_of(stored);
  ZERORT_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(source[i]), magnitude = bits & 0x7fffffffu;
    const std::uint32_t quotient = bits_of(float_of(magnitude) / scale);
    const std::uint32_t chance = mixed(mixed((low + static_cast<std::uint32_t>(i)) ^ key) ^ key1) >> 12;
    const auto down = static_cast<std::int32_t>((one - quotient + chance) >> 20);
    const std::int32_t least = !is_signed && magnitude != 0 ? 1 : 0;
    const std::int32_t code = top - down > least ? top - down : least;
    const std::uint32_t sign = is_signed ? bits >> 31 << 7 : 0u;
    codes[i] = static_cast<std::uint8_t>(code == 0 ? 0u : static_cast<std::uint32_t>(code) | sign);
  }
}

template <bool is_signed>
ZERORT_INLINE void decode_one(float* out, const std::uint8_t* payload, std::size_t count) {
  constexpr std::uint32_t top = is_signed ? 127 : 255;
  float scale;
  std::memcpy(&scale, payload, 4);
  const std::uint8_t* codes = payload + 4;
  ZERORT_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t code = codes[i] & top;
    const std::uint32_t bits = code == 0 ? 0u : one - ((top - code) << 20);
    const std::uint32_t sign = is_signed ? std::uint32_t{codes[i]} >> 7 << 31 : 0u;
    out[i] = float_of(bits | sign) * scale;
  }
}

template <bool is_signed>
ZERORT_INLINE void encode(std::uint8_t* payload, const float* source, std::size_t numel, std::uint64_t start,
                          std::uint32_t key0, std::uint32_t key1) {
  for (std::size_t at = 0; at < numel; at += moment_block, payload += moment_nbytes) {
    const std::uint64_t index = start + at;
    const std::uint32_t key = mixed(key0 + static_cast<std::uint32_t>(index >> 32) * 0x9e3779b9u);
    encode_one<is_signed>(payload, source + at, std::min(moment_block, numel - at), static_cast<std::uint32_t>(index),
                          key, key1);
  }
}

template <bool is_signed>
ZERORT_INLINE void decode(float* out, const std::uint8_t* payload, std::size_t numel) {
  for (std::size_t at = 0; at < numel; at += moment_block, payload += moment_nbytes)
    decode_one<is_signed>(out + at, payload, std::min(moment_block, numel - at));
}

}  // namespace

namespace moment_loops {

ZERORT_CLONES void encode_signed(std::uint8_t* payload, const float* source, std::size_t numel, std::uint64_t start,
                                 std::uint32_t key0, std::uint32_t key1) {
  encode<true>(payload, source, numel, start, key0, key1);
}
ZERORT_CLONES void encode_unsigned(std::uint8_t* payload, const float* source, std::size_t numel, std::uint64_t start,
                                   std::uint32_t key0, std::uint32_t key1) {
  encode<false>(payload, source, numel, start, key0, key1);
}
ZERORT_CLONES void decode_signed(float* out, const std::uint8_t* payload, std::size_t numel) {
  decode<true>(out, payload, numel);
}
ZERORT_CLONES void decode_unsigned(float* out, const std::uint8_t* payload, std::size_t numel) {
  decode<false>(out, payload, numel);
}

}  // namespace moment_loops

void encode_moments(std::uint8_t* payload, const float* source, std::size_t numel, bool is_signed, std::uint64_t start,
                    std::uint32_t key0, std::uint32_t key1) {
  (is_signed ? moment_loops::encode_signed : moment_loops::encode_unsigned)(payload, source, numel, start, key0, key1);
}

void decode_moments(float* out, const std::uint8_t* payload, std::size_t numel, bool is_signed) {
  (is_signed ? moment_loops::decode_signed : moment_loops::decode_unsigned)(out, payload, numel);
}

}  // namespace zerort
