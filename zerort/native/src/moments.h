// Moments in 8 bits: blocks of 256 elements as 260 bytes, a float32 scale and 256 codes. The definition is
// zerort/native/reference/moments.py; the bits are the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerort {

constexpr std::size_t moment_block = 256, moment_nbytes = 260;

// `start` is the global index of source[0], a multiple of a block; both payloads are aligned to 4 bytes.
void encode_moments(std::uint8_t* payload, const float* source, std::size_t numel, bool is_signed, std::uint64_t start,
                    std::uint32_t key0, std::uint32_t key1);
void decode_moments(float* out, const std::uint8_t* payload, std::size_t numel, bool is_signed);

}  // namespace zerort
