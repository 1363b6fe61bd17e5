// The optimizers, casts and measurements of the GPU; `kernels_cuda.py` launches them.
//
// Each operation rounds to the parameter's type T, float or double, and stands in the order of native/src/optim.cpp, and no product is fused with a sum
// (--fmad=false): so the GPU gives the host's bits. These kernels wait for memory, not for arithmetic, so that is free.
#include <cuda_fp16.h>

typedef long long Index;

// As in native/src/dtypes.h.
enum Dtype { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBfloat16 = 3 };

__device__ inline Index this_element() { return blockIdx.x * (Index)blockDim.x + threadIdx.x; }

__device__ inline float load(const void *array, int dtype, Index i) {
  if (dtype == kBfloat16) return __uint_as_float((unsigned)((const unsigned short *)array)[i] << 16);
  if (dtype == kFloat16) return __half2float(__ushort_as_half(((const unsigned short *)array)[i]));
  if (dtype == kFloat64) return (float)((const double *)array)[i];
  return ((const float *)array)[i];
}

__device__ inline double load_wide(const void *array, int dtype, Index i) {
  return dtype == kFloat64 ? ((const double *)array)[i] : (double)load(array, dtype, i);
}

// As the type that is computed in, which is said by a value of it.
__device__ inline float load_as(float, const void *array, int dtype, Index i) { return load(array, dtype, i); }
__device__ inline double load_as(double, const void *array, int dtype, Index i) { return load_wide(array, dtype, i); }

__device__ inline float root(float value) { return sqrtf(value); }
__device__ inline double root(double value) { return sqrt(value); }

__device__ inline unsigned short as_bfloat16(float value) {
  unsigned bits = __float_as_uint(value);
  if (value != value) return (unsigned short)(bits >> 16 | 0x40);  // quiet, or rounding could make it infinity
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ inline void store(void *array, int dtype, Index i, float value) {
  if (dtype == kBfloat16) ((unsigned short *)array)[i] = as_bfloat16(value);
  else if (dtype == kFloat16) ((unsigned short *)array)[i] = __half_as_ushort(__float2half_rn(value));
  else if (dtype == kFloat64) ((double *)array)[i] = value;
  else ((float *)array)[i] = value;
}

// Parameters in float32 may lie in two halves: `remainder`, and the bfloat16 copy, rounded half away from zero
// (native/src/masters.h).
__device__ inline float load_param(const float *param, const unsigned short *remainder, const void *copy, Index i) {
  if (!remainder) return param[i];
  unsigned low = remainder[i];
  return __uint_as_float(((unsigned)((const unsigned short *)copy)[i] << 16) + low - ((low & 0x8000u) << 1));
}
__device__ inline double load_param(const double *param, const unsigned short *, const void *, Index i) {
  return param[i];
}

__device__ inline unsigned short rounded_away(float value) {
  unsigned bits = __float_as_uint(value);
  return (unsigned short)((value != value ? (bits & 0x80000000u) | 0x7fc00000u : bits + 0x8000u) >> 16);
}

__device__ inline unsigned short remainder_of(float value) {
  return value != value ? 0 : (unsigned short)__float_as_uint(value);
}

__device__ inline void store_param(float *param, unsigned short *remainder, void *copy, int copy_dtype, Index i, float value) {
  if (remainder) remainder[i] = remainder_of(value);
  else param[i] = value;
  if (copy && copy_dtype == kBfloat16) ((unsigned short *)copy)[i] = rounded_away(value);
  else if (copy) store(copy, copy_dtype, i, value);
}
__device__ inline void store_param(double *param, unsigned short *, void *, int, Index i, double value) {
  param[i] = value;
}

extern "C" __global__ void split_master(Index numel, unsigned short *param, unsigned short *remainder, const float *master) {
  Index i = this_element();
  if (i >= numel) return;
  param[i] = rounded_away(master[i]);
  if (remainder) remainder[i] = remainder_of(master[i]);
}

extern "C" __global__ void join_master(Index numel, float *master, const void *param, const unsigned short *remainder) {
  Index i = this_element();
  if (i < numel) master[i] = load_param((const float *)0, remainder, param, i);
}

// np.sign: 0 for zeros, NaN for NaN.
template <typename T>
__device__ inline T sign(T value) {
  return value > 0 ? T(1) : value < 0 ? T(-1) : value == 0 ? T(0) : value;
}

extern "C" __global__ void cast(Index numel, void *out, int out_dtype, const void *source, int source_dtype) {
  Index i = this_element();
  if (i < numel) store(out, out_dtype, i, load(source, source_dtype, i));
}

// Sums of 16-bit floats are rounded once, as on the host; those of float64 are made in float64.
extern "C" __global__ void add(Index numel, void *out, int out_dtype, const void *source, int source_dtype) {
  Index i = this_element();
  if (i >= numel) return;
  if (out_dtype == kFloat64) ((double *)out)[i] += load_wide(source, source_dtype, i);
  else store(out, out_dtype, i, load(out, out_dtype, i) + load(source, source_dtype, i));
}

// A copy is 16 bits wide, and that of a parameter in float32.
template <typename T>
__global__ void adamw(Index numel, T *param, unsigned short *remainder, const void *grad, int grad_dtype, T *exp_avg, T *exp_avg_sq,
                      void *copy_out, int copy_dtype, T scale, T decay, T beta1, T rest1, T beta2, T rest2,
                      T root_correction, T eps, T step_size) {
  Index i = this_element();
  if (i >= numel) return;
  T g = load_as(T(0), grad, grad_dtype, i) * scale;
  T m = exp_avg[i] * beta1 + g * rest1;
  T v = exp_avg_sq[i] * beta2 + g * rest2 * g;
  T p = load_param(param, remainder, copy_out, i) * decay - m * step_size / (root(v) * root_correction + eps);
  exp_avg[i] = m;
  exp_avg_sq[i] = v;
  store_param(param, remainder, copy_out, copy_dtype, i, p);
}

// Moments in 8 bits, blocks of 256 elements as 260 bytes: the definition is native/reference/moments.py. A warp to each
// block; lane l has elements l, l + 32, ….
__device__ inline unsigned mixed(unsigned h) {
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}

__device__ inline float decoded(unsigned code, unsigned top, float scale) {
  unsigned steps = code & top;
  unsigned bits = steps ? 0x3f800000u - ((top - steps) << 20) : 0;
  if (top == 127) bits |= code >> 7 << 31;
  return __uint_as_float(bits) * scale;
}

__device__ inline void store_block(unsigned char *block, const float *values, int count, int top,
                                   unsigned long long index, unsigned key0, unsigned key1) {
  int lane = threadIdx.x % 32;
  unsigned largest = 0;
  for (int k = 0; k < 8; ++k) {
    unsigned magnitude = lane + 32 * k < count ? __float_as_uint(values[k]) & 0x7fffffffu : 0;
    if (magnitude > largest) largest = magnitude;
  }
  for (int half = 16; half; half /= 2) {
    unsigned other = __shfl_xor_sync(0xffffffffu, largest, half);
    if (other > largest) largest = other;
  }
  bool is_broken = largest >= 0x7f800000u;
  if (lane == 0) *(unsigned *)block = is_broken ? 0x7fc00000u : largest;
  unsigned key = mixed(key0 + (unsigned)(index >> 32) * 0x9e3779b9u);
  for (int k = 0; k < 8; ++k) {
    int i = lane + 32 * k;
    if (i >= count) break;
    int code = 0;
    if (largest && !is_broken) {
      unsigned bits = __float_as_uint(values[k]), magnitude = bits & 0x7fffffffu;
      unsigned quotient = __float_as_uint(__uint_as_float(magnitude) / __uint_as_float(largest));
      unsigned chance = mixed(mixed(((unsigned)index + i) ^ key) ^ key1) >> 12;
      int least = top == 255 && magnitude ? 1 : 0;
      code = top - (int)((0x3f800000u - quotient + chance) >> 20);
      if (code < least) code = least;
      if (code && top == 127) code |= bits >> 31 << 7;
    }
    block[4 + i] = (unsigned char)code;
  }
}

extern "C" __global__ void adamw_blocks(Index numel, float *param, unsigned short *remainder, const void *grad,
                                        int grad_dtype, unsigned char *exp_avg, unsigned char *exp_avg_sq,
                                        void *copy_out, int copy_dtype, unsigned long long start, unsigned mean0,
                                        unsigned mean1, unsigned square0, unsigned square1, float scale, float decay,
                                        float beta1, float rest1, float beta2, float rest2, float root_correction,
                                        float eps, float step_size) {
  Index number = this_element() / 32, begin = number * 256;
  if (begin >= numel) return;  // the whole warp
  int lane = threadIdx.x % 32, count = begin + 256 < numel ? 256 : (int)(numel - begin);
  exp_avg += number * 260;
  exp_avg_sq += number * 260;
  float mean_scale = *(const float *)exp_avg, square_scale = *(const float *)exp_avg_sq;
  float means[8], squares[8];
  for (int k = 0; k < 8; ++k) {
    Index i = begin + lane + 32 * k;
    means[k] = squares[k] = 0;
    if (i >= numel) continue;
    float g = load(grad, grad_dtype, i) * scale;
    float m = decoded(exp_avg[4 + lane + 32 * k], 127, mean_scale) * beta1 + g * rest1;
    float v = decoded(exp_avg_sq[4 + lane + 32 * k], 255, square_scale) * beta2 + g * rest2 * g;
    float p = load_param(param, remainder, copy_out, i) * decay - m * step_size / (root(v) * root_correction + eps);
    store_param(param, remainder, copy_out, copy_dtype, i, p);
    means[k] = m;
    squares[k] = v;
  }
  store_block(exp_avg, means, count, 127, start + begin, mean0, mean1);
  store_block(exp_avg_sq, squares, count, 255, start + begin, square0, square1);
}

// Without momentum, `buffer` is null.
template <typename T>
__global__ void sgd(Index numel, T *param, unsigned short *remainder, const void *grad, int grad_dtype, T *buffer, void *copy_out, int copy_dtype,
                    int first, int nesterov, T scale, T weight_decay, T momentum, T rest, T lr) {
  Index i = this_element();
  if (i >= numel) return;
  T before = load_param(param, remainder, copy_out, i);
  T g = load_as(T(0), grad, grad_dtype, i) * scale + before * weight_decay;
  T direction = g;
  if (buffer) {
    T b = first ? g : buffer[i] * momentum + g * rest;
    buffer[i] = b;
    direction = nesterov ? g + b * momentum : b;
  }
  T p = before - direction * lr;
  store_param(param, remainder, copy_out, copy_dtype, i, p);
}

template <typename T>
__global__ void lion(Index numel, T *param, unsigned short *remainder, const void *grad, int grad_dtype, T *exp_avg, void *copy_out,
                     int copy_dtype, T scale, T decay, T beta1, T rest1, T beta2, T rest2, T lr) {
  Index i = this_element();
  if (i >= numel) return;
  T g = load_as(T(0), grad, grad_dtype, i) * scale;
  T m = exp_avg[i];
  T p = load_param(param, remainder, copy_out, i) * decay - sign(m * beta1 + g * rest1) * lr;
  exp_avg[i] = m * beta2 + g * rest2;
  store_param(param, remainder, copy_out, copy_dtype, i, p);
}

// One pass over an array, a warp to each block of `block` elements: multiply it (if `scales`), sum its squares (if
// `sums`), and find the first element that is not finite. Lane l adds elements l, l + 32, …, and the lanes are added
// in halves: the order of native/src/square.cpp, so the host's bits.
extern "C" __global__ void measure(Index numel, void *array, int dtype, Index block, int scales, double scale,
                                   double *sums, unsigned long long *first) {
  Index number = this_element() / 32;
  int lane = threadIdx.x % 32;
  Index begin = number * block;
  if (begin >= numel) return;  // the whole warp
  Index end = begin + block < numel ? begin + block : numel;
  double sum = 0;
  for (Index i = begin + lane; i < end; i += 32) {
    if (scales && dtype == kFloat64) ((double *)array)[i] *= scale;
    else if (scales) store(array, dtype, i, load(array, dtype, i) * (float)scale);
    double value = load_wide(array, dtype, i);
    if (!isfinite(value)) atomicMin(first, (unsigned long long)i);
    sum += value * value;
  }
  for (int half = 16; half; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
  if (sums && lane == 0) sums[number] = sum;
}
