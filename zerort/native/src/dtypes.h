// Element types and reductions by code. The same codes stand in zerort/native/dtypes.py; they also travel through
// shared memory between ranks, so a code never changes its meaning.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerort {

enum class Dtype : std::uint8_t {
  float32 = 0,
  float64,
  float16,
  bfloat16,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
};
constexpr std::size_t dtype_count = 12;

enum class Reduction : std::uint8_t { sum = 0, max, min };
constexpr std::size_t reduction_count = 3;

constexpr std::size_t itemsize(Dtype dtype) {
  constexpr std::uint8_t sizes[dtype_count] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8};
  return sizes[static_cast<std::size_t>(dtype)];
}

constexpr bool is_float(Dtype dtype) { return dtype <= Dtype::bfloat16; }

constexpr bool is_half(Dtype dtype) { return dtype == Dtype::float16 || dtype == Dtype::bfloat16; }

}  // namespace zerort
