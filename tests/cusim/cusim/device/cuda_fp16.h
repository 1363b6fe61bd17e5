// __half over the compiler's _Float16.
#pragma once

struct __half_raw { unsigned short x; };

struct __half {
  _Float16 value;
  __half() = default;
  __half(float x) : value((_Float16)x) {}
  __half(const __half_raw &raw) { memcpy(&value, &raw.x, sizeof value); }
  explicit __half(bool x) : value((_Float16)(float)x) {}
  explicit __half(double x) : value((_Float16)x) {}
  explicit __half(int x) : value((_Float16)x) {}
  explicit __half(unsigned x) : value((_Float16)x) {}
  explicit __half(long long x) : value((_Float16)x) {}
  explicit __half(unsigned long long x) : value((_Float16)x) {}
  operator float() const { return (float)value; }
  operator __half_raw() const {
    __half_raw raw;
    memcpy(&raw.x, &value, sizeof value);
    return raw;
  }
};
typedef __half half;

inline unsigned short __half_as_ushort(__half x) { return __half_raw(x).x; }
inline __half __ushort_as_half(unsigned short x) { return __half(__half_raw{x}); }
inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return (float)x; }
inline bool __hisnan(__half x) { return std::isnan((float)x); }
inline int __hisinf(__half x) { return std::isinf((float)x) ? ((float)x > 0 ? 1 : -1) : 0; }
