// bfloat16: stored in 16 bits, computed in float, rounded to the nearest even.
#pragma once
#include <cstdint>
#include <cstring>

namespace cusim {

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, sizeof value);
    return value;
  }
  static BFloat16 of(float value) {
    uint32_t all;
    memcpy(&all, &value, sizeof all);
    return {value != value ? (uint16_t)0x7fff : (uint16_t)((all + 0x7fff + ((all >> 16) & 1)) >> 16)};
  }
};

}  // namespace cusim
