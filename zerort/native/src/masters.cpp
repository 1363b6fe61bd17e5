#include "masters.h"

#include "compiler.h"
#include "half.h"

namespace zerort {
namespace master_loops {

ZERORT_CLONES void round(std::uint16_t* param, const float* master, std::size_t numel) {
  ZERORT_INDEPENDENT
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = bits_of(master[i]);
    const std::uint32_t rounded = master[i] != master[i] ? (bits & 0x80000000u) | 0x7fc00000u : bits + 0x8000u;
    param[i] = static_cast<std::uint16_t>(rounded >> 16);
  }
}

ZERORT_CLONES void split(std::uint16_t* param, std::uint16_t* remainder, const float* master, std::size_t numel) {
  ZERORT_INDEPENDENT
  for (std::size_t i = 0; i < numel; ++i) {
    const bool is_nan = master[i] != master[i];
    const std::uint32_t bits = bits_of(master[i]);
    const std::uint32_t rounded = is_nan ? (bits & 0x80000000u) | 0x7fc00000u : bits + 0x8000u;
    param[i] = static_cast<std::uint16_t>(rounded >> 16);
    remainder[i] = static_cast<std::uint16_t>(is_nan ? 0u : bits);
  }
}

ZERORT_CLONES void join(float* master, const std::uint16_t* param, const std::uint16_t* remainder, std::size_t numel) {
  ZERORT_INDEPENDENT
  for (std::size_t i = 0; i < numel; ++i) {
    const std::uint32_t low = remainder[i];
    master[i] = float_of((std::uint32_t{param[i]} << 16) + low - ((low & 0x8000u) << 1));
  }
}

}  // namespace master_loops

void split_master(std::uint16_t* param, std::uint16_t* remainder, const float* master, std::size_t numel) {
  if (remainder == nullptr)
    master_loops::round(param, master, numel);
  else
    master_loops::split(param, remainder, master, numel);
}

void join_master(float* master, const std::uint16_t* param, const std::uint16_t* remainder, std::size_t numel) {
  master_loops::join(master, param, remainder, numel);
}

}  // namespace zerort
