// Blockwise int8 and int4: codes times one scale per block. The definition is zerort/native/reference/blocks.py; the
// bits are the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerort {

struct BlockRounding {
  bool stochastic;
  std::uint32_t key0, key1;
};

// Elements of a block, and its bytes in scales and codes.
constexpr std::size_t block_numel(int bits) { return bits == 8 ? 256 : 128; }
constexpr std::size_t scale_nbytes(int bits) { return bits == 8 ? 4 : 2; }
constexpr std::size_t code_nbytes(int bits, std::size_t numel) {
  return bits == 8 ? numel : numel / 128 * 64 + (numel % 128 + 1) / 2;
}

// `start` is the global index of source[0], a multiple of a block. `scales` is aligned to its elements. With a `base`,
// codes are of what `source` has more than that; null: of all of it.
void encode_blocks(int bits, const float* source, const float* base, std::size_t numel, std::uint64_t start,
                   BlockRounding rounding, void* scales, void* codes);
// `adds`: to what `out` holds, which is then a base.
void decode_blocks(int bits, float* out, std::size_t numel, const void* scales, const void* codes, bool adds);

}  // namespace zerort
