// Master weights in float32 and the bfloat16 parameters that they round to: half away from zero, so that parameter and
// the lower 16 bits of the master, the remainder, give the master back (nearest even would not: decision 0130).
//
//   parameter    (bits + 0x8000) >> 16        NaN: 0x7fc0 with its sign, and a remainder of 0
//   remainder    bits & 0xffff
//   master       (parameter << 16) + the remainder as a signed number
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerort {

// `remainder` may be null: then only the parameter is written.
void split_master(std::uint16_t* param, std::uint16_t* remainder, const float* master, std::size_t numel);
void join_master(float* master, const std::uint16_t* param, const std::uint16_t* remainder, std::size_t numel);

}  // namespace zerort
