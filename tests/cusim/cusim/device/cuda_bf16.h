// __nv_bfloat16: the upper half of a float, rounded to nearest even.
#pragma once

struct __nv_bfloat16_raw { unsigned short x; };

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(const __nv_bfloat16_raw &raw) : bits(raw.x) {}
  __nv_bfloat16(float x) {
    unsigned all;
    memcpy(&all, &x, sizeof all);
    bits = x != x ? 0x7fff : (unsigned short)((all + 0x7fff + ((all >> 16) & 1)) >> 16);
  }
  explicit __nv_bfloat16(double x) : __nv_bfloat16((float)x) {}
  operator float() const {
    unsigned all = (unsigned)bits << 16;
    float x;
    memcpy(&x, &all, sizeof x);
    return x;
  }
  operator __nv_bfloat16_raw() const { return {bits}; }
};
typedef __nv_bfloat16 nv_bfloat16;

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16(__nv_bfloat16_raw{x}); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return (float)x; }
inline bool __hisnan(__nv_bfloat16 x) { return std::isnan((float)x); }
inline int __hisinf(__nv_bfloat16 x) { return std::isinf((float)x) ? ((float)x > 0 ? 1 : -1) : 0; }
