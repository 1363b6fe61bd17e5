// A histogram of the upper bits finds the few candidates for the last place; only these are compared with each other.
#include "largest.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <vector>

namespace zerort {
namespace {

constexpr int low_bits = 20;  // of 31: exponent and three more bits are looked at first
constexpr std::size_t buckets = std::size_t{1} << (31 - low_bits);

inline std::uint32_t magnitude(const float* source, std::size_t at) {
  std::uint32_t bits;
  std::memcpy(&bits, source + at, sizeof bits);
  return bits & 0x7FFFFFFFu;  // as a number, NaN is above infinity, and that above all others
}

// Larger for larger magnitudes; of equal ones, for the first.
inline std::uint64_t rank_of(std::uint32_t magnitude, std::size_t at) {
  return (std::uint64_t{magnitude} << 16) | (0xFFFFu - at);
}

std::uint64_t last_kept(const float* source, std::size_t numel, std::size_t keep, std::vector<std::uint64_t>& candidates) {
  std::array<std::uint32_t, buckets> counts{};
  for (std::size_t at = 0; at < numel; ++at) ++counts[magnitude(source, at) >> low_bits];
  std::size_t bucket = buckets - 1, above = 0;
  while (above + counts[bucket] < keep) above += counts[bucket--];
  candidates.clear();
  for (std::size_t at = 0; at < numel; ++at) {
    const std::uint32_t found = magnitude(source, at);
    if (found >> low_bits == bucket) candidates.push_back(rank_of(found, at));
  }
  const auto last = candidates.begin() + static_cast<std::ptrdiff_t>(keep - above - 1);
  std::nth_element(candidates.begin(), last, candidates.end(), std::greater<>());
  return *last;
}

}  // namespace

void find_largest(const float* source, std::size_t numel, std::size_t block, std::size_t keep, std::uint16_t* positions) {
  std::vector<std::uint64_t> candidates;
  candidates.reserve(block);
  for (std::size_t first = 0; first < numel; first += block) {
    const std::size_t here = std::min(block, numel - first), kept = std::min(keep, here);
    const std::uint64_t least = kept == here ? 0 : last_kept(source + first, here, kept, candidates);
    for (std::size_t at = 0; at < here; ++at) {
      if (rank_of(magnitude(source + first, at), at) >= least) *positions++ = static_cast<std::uint16_t>(at);
    }
  }
}

}  // namespace zerort
