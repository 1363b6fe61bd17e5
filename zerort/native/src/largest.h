// Where the largest magnitudes of each block are. The definition is zerort/native/reference/largest.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerort {

// `positions` has `keep` numbers for each block of `block` elements (at most 65,536), as many as it has for a short one.
void find_largest(const float* source, std::size_t numel, std::size_t block, std::size_t keep, std::uint16_t* positions);

}  // namespace zerort
