// Blockwise int8 and int4, bfloat16, and the largest of each block on the GPU; `kernels_cuda.py` launches them. The
// definition is native/reference/blocks.py and largest.py, the host's form native/src/blocks.cpp: the same operations in
// the same order, so the same bits. Nothing is fused (--fmad=false). Values are float32, float16 or bfloat16, read and
// written where they lie.
#include <cuda_fp16.h>

typedef long long Index;

enum Dtype { kFloat32 = 0, kFloat16 = 2, kBfloat16 = 3 };  // as in native/src/dtypes.h

#define INFINITY_BITS 0x7f800000u
#define SMALLEST_NORMAL 0x00800000u

__device__ inline Index this_element() { return blockIdx.x * (Index)blockDim.x + threadIdx.x; }

__device__ inline float load(const void *array, int dtype, Index i) {
  if (dtype == kBfloat16) return __uint_as_float((unsigned)((const unsigned short *)array)[i] << 16);
  if (dtype == kFloat16) return __half2float(__ushort_as_half(((const unsigned short *)array)[i]));
  return ((const float *)array)[i];
}

__device__ inline unsigned short as_bfloat16(float value) {
  unsigned bits = __float_as_uint(value);
  if (value != value) return (unsigned short)((bits >> 16 & 0x8000u) | 0x7fc0u);
  return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

__device__ inline void store(void *array, int dtype, Index i, float value) {
  if (dtype == kBfloat16) ((unsigned short *)array)[i] = as_bfloat16(value);
  else if (dtype == kFloat16) ((unsigned short *)array)[i] = __half_as_ushort(__float2half_rn(value));
  else ((float *)array)[i] = value;
}

__device__ inline unsigned mixed(unsigned h) {
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}

struct Block {
  float scale, limit;
  int largest_code;
  unsigned key, key1, low;
  int stochastic;
};

__device__ inline int code_of(const Block &block, float value, unsigned at) {
  unsigned word = __float_as_uint(value), magnitude = word & 0x7fffffffu;
  if (magnitude > INFINITY_BITS) return block.largest_code;
  if (magnitude == INFINITY_BITS) return word >> 31 ? 1 - block.largest_code : block.largest_code - 1;
  float quotient = value / block.scale;
  if (!block.stochastic) return (int)rintf(quotient);
  unsigned chance = mixed(mixed((block.low + at) ^ block.key) ^ block.key1);
  float floor = floorf(quotient + (float)(chance >> 8) * 5.9604644775390625e-08f);  // 2^-24
  return (int)fminf(fmaxf(floor, -block.limit), block.limit);
}

__device__ inline unsigned largest_of_warp(unsigned value) {
  for (int bits = 16; bits; bits /= 2) {
    unsigned other = __shfl_xor_sync(0xffffffffu, value, bits);
    if (other > value) value = other;
  }
  return value;
}

__device__ inline float value_of(unsigned scale, int code, int bits) {
  int largest_code = bits == 8 ? 127 : 7;
  if (scale >> 31) {
    if (code == largest_code) return __uint_as_float(0x7fc00000u);
    if (code == largest_code - 1) return __uint_as_float(INFINITY_BITS);
    if (code == 1 - largest_code) return __uint_as_float(INFINITY_BITS | 0x80000000u);
  }
  return (float)code * __uint_as_float(scale & 0x7fffffffu);
}

// What was lost before, bfloat16, or null: then nothing is kept.
__device__ inline float with_residual(const unsigned short *residual, Index i, float value) {
  return residual ? value + __uint_as_float((unsigned)residual[i] << 16) : value;
}

// What is lost now of `value`, of which `back` is left; nothing of what is not finite.
__device__ inline void keep_residual(unsigned short *residual, Index i, float value, float back) {
  if (!residual) return;
  float lost = value - back;
  residual[i] = (__float_as_uint(lost) & 0x7fffffffu) < INFINITY_BITS ? as_bfloat16(lost) : (unsigned short)0;
}

// What a difference was taken from, or is added to: where that is not finite it counts as 0.
__device__ inline float counted(float base) {
  return (__float_as_uint(base) & 0x7fffffffu) < INFINITY_BITS ? base : 0.0f;
}

// What is coded of element `i`: with what was lost before, or what it has more than a base.
__device__ inline float wanted(const void *source, int dtype, const unsigned short *residual, const void *base, Index i) {
  float value = with_residual(residual, i, load(source, dtype, i));
  return base ? value - counted(load(base, dtype, i)) : value;
}

// A warp to each block.
extern "C" __global__ void encode_blocks(Index numel, const void *source, int dtype, void *scales, void *codes, int bits,
                                         unsigned long long start, int stochastic, unsigned key0, unsigned key1,
                                         unsigned short *residual, const void *base) {
  Index number = this_element() / 32;
  int lane = threadIdx.x % 32, length = bits == 8 ? 256 : 128;
  Index begin = number * length;
  if (begin >= numel) return;  // the whole warp
  int count = begin + length < numel ? length : (int)(numel - begin);
  unsigned largest = 0, all = 0;
  for (int i = lane; i < count; i += 32) {
    float value = wanted(source, dtype, residual, base, begin + i);
    unsigned magnitude = __float_as_uint(value) & 0x7fffffffu;
    if (magnitude > all) all = magnitude;
    if (magnitude < INFINITY_BITS && magnitude > largest) largest = magnitude;
  }
  largest = largest_of_warp(largest);
  bool marked = largest_of_warp(all) >= INFINITY_BITS;
  Block block;
  block.largest_code = bits == 8 ? 127 : 7;
  block.limit = (float)(marked ? block.largest_code - 2 : block.largest_code);
  unsigned scale = __float_as_uint(__uint_as_float(largest) / block.limit);
  if (scale < SMALLEST_NORMAL) scale = SMALLEST_NORMAL;
  if (bits == 4) scale = (scale + 0xffffu) & 0xffff0000u;
  block.scale = __uint_as_float(scale);
  unsigned long long index = start + (unsigned long long)begin;
  block.low = (unsigned)index;
  block.key = mixed(key0 + (unsigned)(index >> 32) * 0x9e3779b9u);
  block.key1 = key1;
  block.stochastic = stochastic;
  if (marked) scale |= 0x80000000u;
  if (lane == 0 && bits == 8) ((unsigned *)scales)[number] = scale;
  if (lane == 0 && bits == 4) ((unsigned short *)scales)[number] = (unsigned short)(scale >> 16);
  int half = bits == 8 ? count : (count + 1) / 2;
  for (int k = lane; k < half; k += 32) {  // of 4 bits: elements k and half + k share a byte
    int code[2] = {0, 0};
    for (int part = 0; part < (bits == 8 ? 1 : 2); part++) {
      int at = k + part * half;
      if (at >= count) break;
      float value = wanted(source, dtype, residual, base, begin + at);
      code[part] = code_of(block, value, at);
      keep_residual(residual, begin + at, value, value_of(scale, code[part], bits));
    }
    if (bits == 8) ((signed char *)codes)[begin + k] = (signed char)code[0];
    else ((unsigned char *)codes)[number * 64 + k] = (unsigned char)((code[0] & 15) | (code[1] & 15) << 4);
  }
}

// The code of element `at` of a block that has `count` of them.
__device__ inline int read_code(const void *codes, int bits, int at, int count) {
  if (bits == 8) return ((const signed char *)codes)[at];
  int half = (count + 1) / 2, pair = ((const unsigned char *)codes)[at < half ? at : at - half];
  return ((at < half ? pair & 15 : pair >> 4) ^ 8) - 8;
}

extern "C" __global__ void decode_blocks(Index numel, void *out, int dtype, const void *scales, const void *codes,
                                         int bits, int adds) {
  Index i = this_element();
  if (i >= numel) return;
  int length = bits == 8 ? 256 : 128;
  Index number = i / length, begin = number * length;
  int count = begin + length < numel ? length : (int)(numel - begin);
  unsigned scale = bits == 8 ? ((const unsigned *)scales)[number] : (unsigned)((const unsigned short *)scales)[number] << 16;
  const char *block = (const char *)codes + begin * bits / 8;
  float value = value_of(scale, read_code(block, bits, (int)(i - begin), count), bits);
  bool is_number = (__float_as_uint(value) & 0x7fffffffu) < INFINITY_BITS;
  if (adds && is_number) value = counted(load(out, dtype, i)) + value;
  store(out, dtype, i, value);
}

// Blocks as rows of bytes, the scale before the codes (`rows.py`); the last row is whole, however much of it is wanted.
extern "C" __global__ void decode_rows(Index numel, void *out, int dtype, const void *rows, int bits) {
  Index i = this_element();
  if (i >= numel) return;
  int length = bits == 8 ? 256 : 128, width = bits == 8 ? 4 : 2;
  const char *row = (const char *)rows + i / length * (width + length * bits / 8);
  unsigned scale = bits == 8 ? *(const unsigned *)row : (unsigned)*(const unsigned short *)row << 16;
  store(out, dtype, i, value_of(scale, read_code(row + width, bits, (int)(i % length), length), bits));
}

// The sum of what several payloads hold, which begin `stride` bytes after each other; in order, rounded once.
extern "C" __global__ void sum_payloads(Index numel, void *out, int dtype, const char *payloads, Index stride, int count,
                                        int bits) {
  Index i = this_element();
  if (i >= numel) return;
  int length = bits == 8 ? 256 : 128;
  Index number = i / length, begin = number * length, codes = (numel + length - 1) / length * (bits == 8 ? 4 : 2);
  int elements = begin + length < numel ? length : (int)(numel - begin);
  float sum = 0;
  for (int one = 0; one < count; one++, payloads += stride) {
    float value;
    if (bits == 16) {
      value = __uint_as_float((unsigned)((const unsigned short *)payloads)[i] << 16);
    } else {
      unsigned scale = bits == 8 ? ((const unsigned *)payloads)[number] : (unsigned)((const unsigned short *)payloads)[number] << 16;
      const char *block = payloads + codes + begin * bits / 8;
      value = value_of(scale, read_code(block, bits, (int)(i - begin), elements), bits);
    }
    sum = one ? sum + value : value;
  }
  store(out, dtype, i, sum);
}

// To bfloat16, with what was lost before, and what is lost now.
extern "C" __global__ void narrow_with_residual(Index numel, unsigned short *out, const void *source, int dtype,
                                                unsigned short *residual) {
  Index i = this_element();
  if (i >= numel) return;
  float value = with_residual(residual, i, load(source, dtype, i));
  out[i] = as_bfloat16(value);
  keep_residual(residual, i, value, __uint_as_float((unsigned)out[i] << 16));
}

extern "C" __global__ void cast_values(Index numel, void *out, int dtype, const void *source, int source_dtype) {
  Index i = this_element();
  if (i < numel) store(out, dtype, i, load(source, source_dtype, i));
}

// -- the largest elements of each block, positions of all blocks before the values of all ------------------------------

#define LARGEST_BLOCK 1024
#define EACH (LARGEST_BLOCK / 32)  // elements of a block that a lane holds

__device__ inline unsigned magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

__device__ inline int sum_of_warp(int value) {
  for (int bits = 16; bits; bits /= 2) value += __shfl_xor_sync(0xffffffffu, value, bits);
  return value;
}

// How many of a block's elements are at least as large; `held`: how many of them this lane has.
__device__ inline int count_from(const float *values, int held, unsigned least) {
  int count = 0;
#pragma unroll
  for (int at = 0; at < EACH; at++) count += at < held && magnitude(values[at]) >= least;
  return sum_of_warp(count);
}

// A warp to each block; with a residual, float32, of `source + residual`, and what is not sent is kept there.
extern "C" __global__ void encode_largest(Index numel, const void *source, int dtype, unsigned short *positions,
                                          unsigned short *kept, int keep, float *residual) {
  Index number = this_element() / 32, begin = number * LARGEST_BLOCK;
  if (begin >= numel) return;  // the whole warp
  int lane = threadIdx.x % 32, count = begin + LARGEST_BLOCK < numel ? LARGEST_BLOCK : (int)(numel - begin);
  int held = (count - lane + 31) / 32;
  Index place = number * keep;
  if (keep > count) keep = count;
  float values[EACH];  // elements lane, lane + 32, …
#pragma unroll
  for (int at = 0; at < EACH; at++) {
    if (at >= held) continue;
    Index i = begin + at * 32 + lane;
    values[at] = load(source, dtype, i);
    if (residual) values[at] = values[at] + residual[i];
  }
  unsigned least = 0;  // of what is kept: found bit by bit
  for (unsigned bit = 1u << 30; bit; bit >>= 1)
    if (count_from(values, held, least | bit) >= keep) least |= bit;
  int equals = keep - count_from(values, held, least + 1);  // of those as large as the least, the first ones
  unsigned below = (1u << lane) - 1;
  int before = 0, same_before = 0;
#pragma unroll
  for (int at = 0; at < EACH; at++) {
    bool here = at < held;
    float value = here ? values[at] : 0;
    unsigned large = magnitude(value);
    unsigned same = __ballot_sync(0xffffffffu, here && large == least);
    bool taken = here && (large > least || (large == least && same_before + __popc(same & below) < equals));
    unsigned votes = __ballot_sync(0xffffffffu, taken);
    float back = 0;
    if (taken) {
      Index to = place + before + __popc(votes & below);
      unsigned short sent = as_bfloat16(value);
      positions[to] = (unsigned short)(at * 32 + lane);
      kept[to] = sent;
      back = __uint_as_float((unsigned)sent << 16);
    }
    if (here && residual) {
      float lost = value - back;
      residual[begin + at * 32 + lane] = magnitude(lost) < INFINITY_BITS ? lost : 0.0f;
    }
    before += __popc(votes);
    same_before += __popc(same);
  }
}

// A block of threads to each block: the sum of several payloads, `stride` bytes apart, in order; rounded once.
extern "C" __global__ void sum_largest(Index numel, void *out, int dtype, const char *payloads, Index stride, int count,
                                       int keep) {
  __shared__ float decoded[LARGEST_BLOCK];
  Index begin = blockIdx.x * (Index)LARGEST_BLOCK;
  int elements = begin + LARGEST_BLOCK < numel ? LARGEST_BLOCK : (int)(numel - begin);
  int own = keep < elements ? keep : elements, rest = (int)(numel % LARGEST_BLOCK);
  Index all = numel / LARGEST_BLOCK * keep + (keep < rest ? keep : rest), first = (Index)blockIdx.x * keep;
  float sums[LARGEST_BLOCK / 256];
  for (int one = 0; one < count; one++, payloads += stride) {
    const unsigned short *positions = (const unsigned short *)payloads + first, *kept = positions + all;
    for (int i = threadIdx.x; i < LARGEST_BLOCK; i += 256) decoded[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < own; i += 256) decoded[positions[i] % LARGEST_BLOCK] = __uint_as_float((unsigned)kept[i] << 16);
    __syncthreads();
#pragma unroll
    for (int at = 0; at < LARGEST_BLOCK / 256; at++) {
      float value = decoded[at * 256 + threadIdx.x];
      sums[at] = one ? sums[at] + value : value;
    }
    __syncthreads();
  }
#pragma unroll
  for (int at = 0; at < LARGEST_BLOCK / 256; at++) {
    int i = at * 256 + threadIdx.x;
    if (i < elements) store(out, dtype, begin + i, sums[at]);
  }
}
