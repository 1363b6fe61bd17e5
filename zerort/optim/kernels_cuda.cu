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
__global__ void adamw(Index numel, T *param, const void *grad, int grad_dtype, T *exp_avg, T *exp_avg_sq,
                      void *copy_out, int copy_dtype, T scale, T decay, T beta1, T rest1, T beta2, T rest2,
                      T root_correction, T eps, T step_size) {
  Index i = this_element();
  if (i >= numel) return;
  T g = load_as(T(0), grad, grad_dtype, i) * scale;
  T m = exp_avg[i] * beta1 + g * rest1;
  T v = exp_avg_sq[i] * beta2 + g * rest2 * g;
  T p = param[i] * decay - m * step_size / (root(v) * root_correction + eps);
  exp_avg[i] = m;
  exp_avg_sq[i] = v;
  param[i] = p;
  if (copy_out) store(copy_out, copy_dtype, i, p);
}

// Without momentum, `buffer` is null.
template <typename T>
__global__ void sgd(Index numel, T *param, const void *grad, int grad_dtype, T *buffer, void *copy_out, int copy_dtype,
                    int first, int nesterov, T scale, T weight_decay, T momentum, T rest, T lr) {
  Index i = this_element();
  if (i >= numel) return;
  T g = load_as(T(0), grad, grad_dtype, i) * scale + param[i] * weight_decay;
  T direction = g;
  if (buffer) {
    T b = first ? g : buffer[i] * momentum + g * rest;
    buffer[i] = b;
    direction = nesterov ? g + b * momentum : b;
  }
  T p = param[i] - direction * lr;
  param[i] = p;
  if (copy_out) store(copy_out, copy_dtype, i, p);
}

template <typename T>
__global__ void lion(Index numel, T *param, const void *grad, int grad_dtype, T *exp_avg, void *copy_out,
                     int copy_dtype, T scale, T decay, T beta1, T rest1, T beta2, T rest2, T lr) {
  Index i = this_element();
  if (i >= numel) return;
  T g = load_as(T(0), grad, grad_dtype, i) * scale;
  T m = exp_avg[i];
  T p = param[i] * decay - sign(m * beta1 + g * rest1) * lr;
  exp_avg[i] = m * beta2 + g * rest2;
  param[i] = p;
  if (copy_out) store(copy_out, copy_dtype, i, p);
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
