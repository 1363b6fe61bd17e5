#include "blocks.h"

#include <algorithm>
#include <cstring>

#include "compiler.h"
#include "half.h"

namespace zerort {
namespace {

constexpr std::uint32_t infinity = 0x7f800000u, smallest_normal = 0x00800000u, quiet_nan = 0x7fc00000u;
constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: a sum with it rounds to nearest even at the units

struct Int8 {
  static constexpr std::size_t block = 256;
  static constexpr int limit = 127;
  using Scale = std::uint32_t;  // the bits of a float32
  static ZERORT_INLINE std::uint32_t rounded_up(std::uint32_t bits) { return bits; }
  static ZERORT_INLINE Scale stored(std::uint32_t bits) { return bits; }
  static ZERORT_INLINE std::uint32_t loaded(Scale scale) { return scale; }
};

struct Int4 {
  static constexpr std::size_t block = 128;
  static constexpr int limit = 7;
  using Scale = std::uint16_t;  // the bits of a bfloat16
  static ZERORT_INLINE std::uint32_t rounded_up(std::uint32_t bits) { return (bits + 0xffffu) & 0xffff0000u; }
  static ZERORT_INLINE Scale stored(std::uint32_t bits) { return static_cast<Scale>(bits >> 16); }
  static ZERORT_INLINE std::uint32_t loaded(Scale scale) { return std::uint32_t{scale} << 16; }
};

ZERORT_INLINE std::uint32_t mixed(std::uint32_t h) {
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}

ZERORT_INLINE float magnitude_of(float value) { return float_of(bits_of(value) & 0x7fffffffu); }

template <bool stochastic>
ZERORT_INLINE std::int8_t code_of(float value, float scale, std::uint32_t index, std::uint32_t key, std::uint32_t key1,
                                  float limit) {
  const float quotient = value / scale;
  if constexpr (!stochastic) {
    return static_cast<std::int8_t>(bits_of(quotient + to_integer));
  } else {
    const std::uint32_t word = mixed(mixed(index ^ key) ^ key1);
    const float shifted = quotient + static_cast<float>(static_cast<std::int32_t>(word >> 8)) * 0x1p-24f;
    const float nearest = (shifted + to_integer) - to_integer;
    const float floor = nearest > shifted ? nearest - 1.0f : nearest;
    const float upper = floor > limit ? limit : floor;
    const float bounded = upper < -limit ? -limit : upper;
    return static_cast<std::int8_t>(bits_of(bounded + to_integer));
  }
}

// One block: its scale, and a byte for each code.
template <typename Format, bool stochastic>
ZERORT_INLINE typename Format::Scale encode_one(const float* source, std::size_t count, std::uint64_t index,
                                                const BlockRounding& rounding, std::int8_t* codes) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<std::int32_t>(bits_of(source[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool marked = static_cast<std::uint32_t>(largest) >= infinity;
  if (marked) {  // of the finite elements
    largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const auto magnitude = static_cast<std::int32_t>(bits_of(source[i]) & 0x7fffffffu);
      if (static_cast<std::uint32_t>(magnitude) < infinity && magnitude > largest) largest = magnitude;
    }
  }
  const float limit = static_cast<float>(marked ? Format::limit - 2 : Format::limit);
  std::uint32_t bits = bits_of(float_of(static_cast<std::uint32_t>(largest)) / limit);
  bits = Format::rounded_up(bits < smallest_normal ? smallest_normal : bits);
  const float scale = float_of(bits);
  const auto low = static_cast<std::uint32_t>(index);
  const std::uint32_t key = mixed(rounding.key0 + static_cast<std::uint32_t>(index >> 32) * 0x9e3779b9u);
  const std::uint32_t key1 = rounding.key1;
  if (marked) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t word = bits_of(source[i]), magnitude = word & 0x7fffffffu;
      if (magnitude < infinity)
        codes[i] = code_of<stochastic>(source[i], scale, low + static_cast<std::uint32_t>(i), key, key1, limit);
      else if (magnitude == infinity)
        codes[i] = static_cast<std::int8_t>(word >> 31 ? 1 - Format::limit : Format::limit - 1);
      else
        codes[i] = Format::limit;
    }
    return Format::stored(bits | 0x80000000u);
  }
  for (std::size_t i = 0; i < count; ++i)
    codes[i] = code_of<stochastic>(source[i], scale, low + static_cast<std::uint32_t>(i), key, key1, limit);
  return Format::stored(bits);
}

// A base counts where it is finite: an infinity, or NaN, of before must not stay for ever.
ZERORT_INLINE float counted(float base) { return (bits_of(base) & 0x7fffffffu) < infinity ? base : 0.0f; }

// `source`, or in `room` what it has more than a base.
ZERORT_INLINE const float* above(const float* source, const float* base, std::size_t count, float* room) {
  if (base == nullptr) return source;
  for (std::size_t i = 0; i < count; ++i) room[i] = source[i] - counted(base[i]);
  return room;
}

template <typename Format>
ZERORT_INLINE void decode_one(float* out, std::size_t count, std::uint32_t scale_bits, const std::int8_t* codes,
                              bool adds) {
  const float scale = float_of(scale_bits & 0x7fffffffu);
  if (adds)
    for (std::size_t i = 0; i < count; ++i) out[i] = counted(out[i]) + static_cast<float>(codes[i]) * scale;
  else
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>(codes[i]) * scale;
  if (scale_bits >> 31 == 0) return;
  for (std::size_t i = 0; i < count; ++i) {
    if (codes[i] == Format::limit) out[i] = float_of(quiet_nan);
    if (codes[i] == Format::limit - 1) out[i] = float_of(infinity);
    if (codes[i] == 1 - Format::limit) out[i] = float_of(infinity | 0x80000000u);
  }
}

template <bool stochastic>
ZERORT_INLINE void encode8(const float* source, const float* base, std::size_t numel, std::uint64_t start,
                           const BlockRounding& rounding, std::uint32_t* scales, std::int8_t* codes) {
  float room[Int8::block];
  std::size_t at = 0;
  for (; at + Int8::block <= numel; at += Int8::block) {
    const float* from = above(source + at, base == nullptr ? base : base + at, Int8::block, room);
    *scales++ = encode_one<Int8, stochastic>(from, Int8::block, start + at, rounding, codes + at);
  }
  if (at == numel) return;
  const float* from = above(source + at, base == nullptr ? base : base + at, numel - at, room);
  *scales = encode_one<Int8, stochastic>(from, numel - at, start + at, rounding, codes + at);
}

// Byte k of a block has the codes of elements k and half + k.
ZERORT_INLINE void pack(std::uint8_t* out, const std::int8_t* codes, std::size_t half) {
  for (std::size_t k = 0; k < half; ++k)
    out[k] = static_cast<std::uint8_t>((codes[k] & 15) | (codes[half + k] & 15) << 4);
}

ZERORT_INLINE void unpack(std::int8_t* codes, const std::uint8_t* packed, std::size_t half) {
  for (std::size_t k = 0; k < half; ++k) {
    const int low = packed[k] & 15, high = packed[k] >> 4;
    codes[k] = static_cast<std::int8_t>((low ^ 8) - 8);
    codes[half + k] = static_cast<std::int8_t>((high ^ 8) - 8);
  }
}

template <bool stochastic>
ZERORT_INLINE void encode4(const float* source, const float* base, std::size_t numel, std::uint64_t start,
                           const BlockRounding& rounding, std::uint16_t* scales, std::uint8_t* packed) {
  constexpr std::size_t block = Int4::block;
  float room[block];
  std::int8_t codes[block + 1];
  std::size_t at = 0;
  for (; at + block <= numel; at += block, packed += block / 2) {
    const float* from = above(source + at, base == nullptr ? base : base + at, block, room);
    *scales++ = encode_one<Int4, stochastic>(from, block, start + at, rounding, codes);
    pack(packed, codes, block / 2);
  }
  if (at == numel) return;
  const float* from = above(source + at, base == nullptr ? base : base + at, numel - at, room);
  *scales = encode_one<Int4, stochastic>(from, numel - at, start + at, rounding, codes);
  codes[numel - at] = 0;  // the other half of the last byte, if the number is odd
  pack(packed, codes, (numel - at + 1) / 2);
}

}  // namespace

namespace block_loops {

ZERORT_CLONES void encode8_nearest(const float* source, const float* base, std::size_t numel, std::uint64_t start,
                                   const BlockRounding& rounding, std::uint32_t* scales, std::int8_t* codes) {
  encode8<false>(source, base, numel, start, rounding, scales, codes);
}
ZERORT_CLONES void encode8_stochastic(const float* source, const float* base, std::size_t numel, std::uint64_t start,
                                      const BlockRounding& rounding, std::uint32_t* scales, std::int8_t* codes) {
  encode8<true>(source, base, numel, start, rounding, scales, codes);
}
ZERORT_CLONES void encode4_nearest(const float* source, const float* base, std::size_t numel, std::uint64_t start,
                                   const BlockRounding& rounding, std::uint16_t* scales, std::uint8_t* codes) {
  encode4<false>(source, base, numel, start, rounding, scales, codes);
}
ZERORT_CLONES void encode4_stochastic(const float* source, const float* base, std::size_t numel, std::uint64_t start,
                                      const BlockRounding& rounding, std::uint16_t* scales, std::uint8_t* codes) {
  encode4<true>(source, base, numel, start, rounding, scales, codes);
}

ZERORT_CLONES void decode8(float* out, std::size_t numel, const std::uint32_t* scales, const std::int8_t* codes,
                           bool adds) {
  std::size_t at = 0;
  for (; at + Int8::block <= numel; at += Int8::block)
    decode_one<Int8>(out + at, Int8::block, *scales++, codes + at, adds);
  if (at < numel) decode_one<Int8>(out + at, numel - at, *scales, codes + at, adds);
}

ZERORT_CLONES void decode4(float* out, std::size_t numel, const std::uint16_t* scales, const std::uint8_t* packed,
                           bool adds) {
  constexpr std::size_t block = Int4::block;
  std::int8_t codes[block + 1];
  std::size_t at = 0;
  for (; at + block <= numel; at += block, packed += block / 2) {
    unpack(codes, packed, block / 2);
    decode_one<Int4>(out + at, block, Int4::loaded(*scales++), codes, adds);
  }
  if (at == numel) return;
  unpack(codes, packed, (numel - at + 1) / 2);
  decode_one<Int4>(out + at, numel - at, Int4::loaded(*scales), codes, adds);
}

}  // namespace block_loops

void encode_blocks(int bits, const float* source, const float* base, std::size_t numel, std::uint64_t start,
                   BlockRounding rounding, void* scales, void* codes) {
  using namespace block_loops;
  if (bits == 8)
    (rounding.stochastic ? encode8_stochastic : encode8_nearest)(
        source, base, numel, start, rounding, static_cast<std::uint32_t*>(scales), static_cast<std::int8_t*>(codes));
  else
    (rounding.stochastic ? encode4_stochastic : encode4_nearest)(
        source, base, numel, start, rounding, static_cast<std::uint16_t*>(scales), static_cast<std::uint8_t*>(codes));
}

void decode_blocks(int bits, float* out, std::size_t numel, const void* scales, const void* codes, bool adds) {
  if (bits == 8)
    block_loops::decode8(out, numel, static_cast<const std::uint32_t*>(scales), static_cast<const std::int8_t*>(codes),
                         adds);
  else
    block_loops::decode4(out, numel, static_cast<const std::uint16_t*>(scales),
                         static_cast<const std::uint8_t*>(codes), adds);
}

}  // namespace zerort
