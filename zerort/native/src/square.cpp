// Element i of a range is squared in double precision and added to lane i % 32; at the end lane j takes lane j + 16, then
// j + 8, 4, 2 and 1. The order depends on nothing but the place in the range: not on its address, the CPU or its
// neighbours, and NumPy can follow it to the bit (zerort/native/reference/measure.py). 32 lanes are four AVX-512
// registers: enough additions in flight to wait for memory only.
#include "square.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cast.h"
#include "compiler.h"
#include "half.h"
#include "strips.h"

namespace zerort {
namespace {

constexpr std::size_t lane_count = 32;
constexpr std::size_t tile_numel = 2048;

typedef double Lanes __attribute__((vector_size(64)));  // eight of them
constexpr std::size_t quarter = sizeof(Lanes) / sizeof(double);

template <typename T>
ZERORT_INLINE void take(Lanes& lanes, const T* from) {
  typedef T Narrow __attribute__((vector_size(quarter * sizeof(T))));
  Narrow narrow;
  std::memcpy(&narrow, from, sizeof narrow);
  const Lanes wide = __builtin_convertvector(narrow, Lanes);
  lanes += wide * wide;
}

template <typename T>
ZERORT_INLINE void add_squares(double* sums, const T* data, std::size_t numel) {
  Lanes a, b, c, d;  // by name: an array of them need not stay in registers
  std::memcpy(&a, sums, sizeof a);
  std::memcpy(&b, sums + quarter, sizeof b);
  std::memcpy(&c, sums + 2 * quarter, sizeof c);
  std::memcpy(&d, sums + 3 * quarter, sizeof d);
  std::size_t i = 0;
  for (; i + lane_count <= numel; i += lane_count) {
    fetch<lane_count>(data, i);
    take(a, data + i);
    take(b, data + i + quarter);
    take(c, data + i + 2 * quarter);
    take(d, data + i + 3 * quarter);
  }
  std::memcpy(sums, &a, sizeof a);
  std::memcpy(sums + quarter, &b, sizeof b);
  std::memcpy(sums + 2 * quarter, &c, sizeof c);
  std::memcpy(sums + 3 * quarter, &d, sizeof d);
  for (std::size_t lane = 0; i < numel; ++i, ++lane) {
    const double value = data[i];
    sums[lane] += value * value;
  }
}

// Two neighbouring bfloat16 as one word, which needs no shuffles to widen: so even lanes are kept apart from odd ones.
ZERORT_INLINE void take_pairs(Lanes& even, Lanes& odd, const std::uint16_t* from) {
  typedef std::uint32_t Words __attribute__((vector_size(32)));
  typedef float Floats __attribute__((vector_size(32)));
  Words words;
  std::memcpy(&words, from, sizeof words);
  const Lanes low = __builtin_convertvector(reinterpret_cast<Floats>(words << 16), Lanes);
  const Lanes high = __builtin_convertvector(reinterpret_cast<Floats>(words & 0xffff0000u), Lanes);
  even += low * low;
  odd += high * high;
}

ZERORT_INLINE void add_bfloat16_squares(double* sums, const std::uint16_t* data, std::size_t numel) {
  Lanes even[2] = {}, odd[2] = {};
  std::size_t i = 0;
  for (; i + lane_count <= numel; i += lane_count) {
    fetch<lane_count>(data, i);
    take_pairs(even[0], odd[0], data + i);
    take_pairs(even[1], odd[1], data + i + lane_count / 2);
  }
  for (std::size_t pair = 0; pair < lane_count / 2; ++pair) {
    sums[2 * pair] = even[pair / quarter][pair % quarter];
    sums[2 * pair + 1] = odd[pair / quarter][pair % quarter];
  }
  for (std::size_t lane = 0; i < numel; ++i, ++lane) {
    const double value = BFloat16::widen_low(data[i]);
    sums[lane] += value * value;
  }
}

}  // namespace

namespace square_loops {

ZERORT_CLONES void float32(double* sums, const float* data, std::size_t numel) { add_squares(sums, data, numel); }
ZERORT_CLONES void float64(double* sums, const double* data, std::size_t numel) { add_squares(sums, data, numel); }
ZERORT_CLONES void bfloat16(double* sums, const std::uint16_t* data, std::size_t numel) {
  add_bfloat16_squares(sums, data, numel);
}

}  // namespace square_loops

double square_sum(Dtype dtype, const void* data, std::size_t numel) {
  alignas(64) double sums[lane_count] = {};
  if (dtype == Dtype::float32) {
    square_loops::float32(sums, static_cast<const float*>(data), numel);
  } else if (dtype == Dtype::float64) {
    square_loops::float64(sums, static_cast<const double*>(data), numel);
  } else if (dtype == Dtype::bfloat16) {
    square_loops::bfloat16(sums, static_cast<const std::uint16_t*>(data), numel);
  } else {
    // Tiles of whole turns: the lanes go on where they stopped.
    static_assert(tile_numel % lane_count == 0);
    alignas(64) float tile[tile_numel];
    for (std::size_t start = 0; start < numel; start += tile_numel) {
      const std::size_t turn = std::min(tile_numel, numel - start);
      cast(Dtype::float32, tile, dtype, static_cast<const char*>(data) + start * itemsize(dtype), turn);
      square_loops::float32(sums, tile, turn);
    }
  }
  for (std::size_t width = lane_count / 2; width > 0; width /= 2)
    for (std::size_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  return sums[0];
}

}  // namespace zerort
