// Rows of tables on a GPU: copied, summed, updated, and brought up to date; `kernels_cuda.py` launches them.
//
// Operations stand in the order of the host's (native/src/rows.cpp, optim/rows/kernels.py), and no product is fused with a sum
// (--fmad=false): so rows that are brought up to date have the host's bits.

typedef long long Index;
typedef unsigned short Bits16;
typedef unsigned int Bits32;
typedef unsigned long long Bits64;

__device__ inline Index this_element() { return blockIdx.x * (Index)blockDim.x + threadIdx.x; }

__device__ inline float root_of(float value) { return sqrtf(value); }
__device__ inline double root_of(double value) { return sqrt(value); }

// A thread to each element. T is as wide as an element.
template <typename T>
__global__ void take_rows(Index numel, T *out, const T *table, const Index *rows, Index width) {
  Index i = this_element();
  if (i < numel) out[i] = table[rows[i / width] * width + i % width];
}

template <typename T>
__global__ void put_rows(Index numel, T *table, const T *values, const Index *rows, Index width) {
  Index i = this_element();
  if (i < numel) table[rows[i / width] * width + i % width] = values[i];
}

// Row r of `out` is the sum of rows `order[starts[r]]` … `order[starts[r + 1] - 1]` of `values`: in this order, or of three and
// more the smallest first, NaN last. Summands are few: the next larger one is looked for each time.
template <typename T>
__global__ void sum_rows(Index numel, T *out, const T *values, const Index *order, const Index *starts, Index width,
                         int by_value) {
  Index i = this_element();
  if (i >= numel) return;
  Index begin = starts[i / width], end = starts[i / width + 1], column = i % width;
  if (!by_value || end - begin < 3) {
    T total = values[order[begin] * width + column];
    for (Index k = begin + 1; k < end; ++k) total += values[order[k] * width + column];
    out[i] = total;
    return;
  }
  T total = 0, last = 0;
  Index summed = 0, count = end - begin;
  while (summed < count) {
    T next = 0;
    bool is_found = false;
    for (Index k = begin; k < end; ++k) {
      T value = values[order[k] * width + column];
      if (value != value || (summed && !(value > last))) continue;
      if (!is_found || value < next) next = value;
      is_found = true;
    }
    for (Index k = begin; k < end; ++k) {  // those of this value, zeros of both signs; at last NaN
      T value = values[order[k] * width + column];
      if (is_found ? value != next : value == value) continue;
      total = summed ? total + value : value;
      ++summed;
    }
    last = next;
  }
  out[i] = total;
}

template <typename T>
__global__ void adamw_rows(Index numel, T *param, const T *grad, T *exp_avg, T *exp_avg_sq, const Index *rows, Index width,
                           T scale, T decay, T beta1, T rest1, T beta2, T rest2, T root_correction, T eps, T step_size) {
  Index i = this_element();
  if (i >= numel) return;
  Index at = rows[i / width] * width + i % width;
  T g = grad[i] * scale;
  T m = exp_avg[at] * beta1 + g * rest1;
  T v = exp_avg_sq[at] * beta2 + g * rest2 * g;
  exp_avg[at] = m;
  exp_avg_sq[at] = v;
  param[at] = param[at] * decay - m * step_size / (root_of(v) * root_correction + eps);
}

// Missed updates of AdamW, a warp to each row: lane l has elements l, l + 32, …. `numbers` has a line of `kept` ages for each of
// decay, mean and square, the terms of the series and their bound, and decay, step size and root correction of the last updates.
enum { kDecay = 0, kMean = 1, kSquare = 2, kTerms = 3, kTermCount = 6, kUpdates = kTerms + kTermCount + 1 };

// One element after every update that it has missed, in double: by the series if it has terms enough, or one after the other.
__device__ inline double brought_up_to_date(double p, double m, double v, Index age, const double *numbers, Index kept,
                                            double eps, double error) {
  const double *terms = numbers + kTerms * kept + age;
  double root = sqrt(v), ratio = m / root, x = eps / root, bound = 1;
  double series = terms[(kTermCount - 1) * kept] * -x;
  for (int k = kTermCount - 2; k > 0; --k) series = (series + terms[k * kept]) * -x;
  for (int k = 0; k < kTermCount; ++k) bound *= x;
  double moved = m == 0 ? 0 : (series + terms[0]) * ratio;
  double found = p * numbers[kDecay * kept + age] - moved;
  double missing = fabs(ratio) * bound * terms[kTermCount * kept];
  if (m == 0 || missing <= error * (fabs(found) + fabs(moved))) return found;
  double beta1 = numbers[kMean * kept + 1], beta2 = numbers[kSquare * kept + 1];
  for (Index missed = age; missed > 0; --missed) {
    const double *update = numbers + kUpdates * kept + missed - 1;
    m *= beta1;
    v *= beta2;
    p = p * update[0] - m * update[kept] / (sqrt(v) * update[2 * kept] + eps);
  }
  return p;
}

template <typename T>
__global__ void late_adamw(Index rows, T *param, T *mean, T *square, Index width, const Index *ages, const double *numbers,
                           Index kept, double eps, double error) {
  Index row = this_element() / 32;
  if (row >= rows) return;  // the whole warp
  int lane = threadIdx.x % 32;
  Index age = ages[row];
  param += row * width;
  mean += row * width;
  square += row * width;
  const double *terms = numbers + kTerms * kept + age;
  unsigned moves = 0, broken = 0;
  double least = __uint_as_float(0x7f800000u);  // infinity
  for (Index i = lane; i < width; i += 32) {
    moves |= mean[i] != T(0);
    broken |= !(square[i] >= T(0));
    if (square[i] < least) least = square[i];
  }
  for (int half = 16; half; half /= 2) {
    moves |= __shfl_xor_sync(0xffffffffu, moves, half);
    broken |= __shfl_xor_sync(0xffffffffu, broken, half);
    double other = __shfl_xor_sync(0xffffffffu, least, half);
    if (other < least) least = other;
  }
  int needed = kTermCount + 1;  // terms of the series; more than there are: each element by itself
  if (!moves) {
    needed = 0;
  } else if (!broken && isfinite(terms[0])) {
    double ratio = eps / (double)root_of((T)least), x = 1;
    for (int k = 1; k <= kTermCount && needed > kTermCount; ++k) {
      x *= ratio;
      if (x * terms[k * kept] <= error * terms[0]) needed = k;
    }
  }
  T decay = (T)numbers[kDecay * kept + age], fade = (T)numbers[kMean * kept + age];
  T shrink = (T)numbers[kSquare * kept + age], minus_eps = (T)-eps;
  for (Index i = lane; i < width; i += 32) {
    T p = param[i], m = mean[i], v = square[i];
    if (needed > kTermCount) {
      p = (T)brought_up_to_date(p, m, v, age, numbers, kept, eps, error);
    } else if (needed == 0) {
      p = p * decay;
    } else {
      T root = root_of(v), moved = m / root;
      if (needed == 1) {
        moved = moved * (T)terms[0];
      } else {
        T x = minus_eps / root, series = x * (T)terms[(needed - 1) * kept];
        for (int k = needed - 2; k > 0; --k) series = (series + (T)terms[k * kept]) * x;
        moved = moved * (series + (T)terms[0]);
      }
      p = p * decay - moved;
    }
    param[i] = p;
    mean[i] = m * fade;
    square[i] = v * shrink;
  }
}

// Without momentum, `running` is null. `matrix` has four lines of `kept` ages.
template <typename T>
__global__ void late_sgd(Index numel, T *param, T *running, Index width, const Index *ages, const double *matrix, Index kept) {
  Index i = this_element();
  if (i >= numel) return;
  const double *by_age = matrix + ages[i / width];
  T before = param[i], p = before * (T)by_age[0];
  if (running) {
    T b = running[i];
    p = p + b * (T)by_age[kept];
    running[i] = b * (T)by_age[3 * kept] + before * (T)by_age[2 * kept];
  }
  param[i] = p;
}

// `numbers` has a line of `kept` ages for each of decay, distance and mean.
template <typename T>
__global__ void late_lion(Index numel, T *param, T *mean, Index width, const Index *ages, const double *numbers, Index kept,
                          int keeps_sign, T least) {
  Index i = this_element();
  if (i >= numel) return;
  const double *by_age = numbers + ages[i / width];
  T m = mean[i], sign = m > 0 ? T(1) : m < 0 ? T(-1) : m;
  param[i] = param[i] * (T)by_age[0] - sign * (T)by_age[kept];
  T faded = m * (T)by_age[2 * kept];
  if (keeps_sign && m != 0 && (faded < 0 ? -faded : faded) < least) faded = m < 0 ? -least : least;
  mean[i] = faded;
}
