// The largest elements of each block of 1,024, on the GPU; `largest_cuda.py` launches these. The definition is
// native/reference/largest.py: magnitudes are compared as bits, and of equal ones the first is taken. A payload has the
// positions of all blocks, then the values as bfloat16. Nothing is fused (--fmad=false).
#include <cuda_fp16.h>

typedef long long Index;

enum Dtype { kFloat32 = 0, kFloat16 = 2, kBfloat16 = 3 };  // as in native/src/dtypes.h

#define ALL_LANES 0xffffffffu
#define BLOCK 1024
#define EACH (BLOCK / 32)  // elements of a block that a lane holds
#define INFINITY_BITS 0x7f800000u

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

__device__ inline float as_float(unsigned short bfloat16) { return __uint_as_float((unsigned)bfloat16 << 16); }

__device__ inline void store(void *array, int dtype, Index i, float value) {
  if (dtype == kBfloat16) ((unsigned short *)array)[i] = as_bfloat16(value);
  else if (dtype == kFloat16) ((unsigned short *)array)[i] = __half_as_ushort(__float2half_rn(value));
  else ((float *)array)[i] = value;
}

__device__ inline unsigned magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

__device__ inline int sum_of_warp(int value) {
  for (int bits = 16; bits; bits /= 2) value += __shfl_xor_sync(ALL_LANES, value, bits);
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
  Index number = (blockIdx.x * (Index)blockDim.x + threadIdx.x) / 32, begin = number * BLOCK;
  if (begin >= numel) return;  // the whole warp
  int lane = threadIdx.x % 32, count = begin + BLOCK < numel ? BLOCK : (int)(numel - begin);
  int held = (count - lane + 31) / 32;
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
  Index place = number * keep;  // of a shorter last block: all before are whole, see below
  unsigned below = (1u << lane) - 1;
  int before = 0, same_before = 0;
#pragma unroll
  for (int at = 0; at < EACH; at++) {
    bool here = at < held;
    float value = here ? values[at] : 0;
    unsigned large = magnitude(value);
    unsigned same = __ballot_sync(ALL_LANES, here && large == least);
    bool taken = here && (large > least || (large == least && same_before + __popc(same & below) < equals));
    unsigned votes = __ballot_sync(ALL_LANES, taken);
    float back = 0;
    if (taken) {
      Index to = place + before + __popc(votes & below);
      unsigned short sent = as_bfloat16(value);
      positions[to] = (unsigned short)(at * 32 + lane);
      kept[to] = sent;
      back = as_float(sent);
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
  __shared__ float decoded[BLOCK];
  Index begin = blockIdx.x * (Index)BLOCK;
  int elements = begin + BLOCK < numel ? BLOCK : (int)(numel - begin);
  int own = keep < elements ? keep : elements, rest = (int)(numel % BLOCK);
  Index all = numel / BLOCK * keep + (keep < rest ? keep : rest), first = (Index)blockIdx.x * keep;
  float sums[BLOCK / 256];
  for (int one = 0; one < count; one++, payloads += stride) {
    const unsigned short *positions = (const unsigned short *)payloads + first, *kept = positions + all;
    for (int i = threadIdx.x; i < BLOCK; i += 256) decoded[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < own; i += 256) decoded[positions[i] % BLOCK] = as_float(kept[i]);
    __syncthreads();
#pragma unroll
    for (int at = 0; at < BLOCK / 256; at++) {
      float value = decoded[at * 256 + threadIdx.x];
      sums[at] = one ? sums[at] + value : value;
    }
    __syncthreads();
  }
#pragma unroll
  for (int at = 0; at < BLOCK / 256; at++) {
    int i = at * 256 + threadIdx.x;
    if (i < elements) store(out, dtype, begin + i, sums[at]);
  }
}
