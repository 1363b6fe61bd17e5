// Short vectors: uint3, dim3, float4 and their kin.
#pragma once

typedef cusim_index uint3;
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define CUSIM_VECTORS(type, name)                                         \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                \
  struct name##3 { type x, y, z; };                                       \
  struct alignas(sizeof(type) < 4 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }        \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

CUSIM_VECTORS(float, float)
CUSIM_VECTORS(double, double)
CUSIM_VECTORS(int, int)
CUSIM_VECTORS(short, short)
CUSIM_VECTORS(unsigned short, ushort)
CUSIM_VECTORS(long long, longlong)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
