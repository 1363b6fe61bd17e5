// Operations stand in the order of the NumPy form (zerort/native/reference/optim.py): the results agree to the bit.
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "compiler.h"

namespace zerort {
namespace {

constexpr std::size_t rows_ahead = 16;

ZERORT_INLINE void ask_for(const char* row, std::size_t nbytes) {
  for (std::size_t k = 0; k < nbytes; k += 64) __builtin_prefetch(row + k);
  __builtin_prefetch(row + nbytes - 1);
}

template <std::size_t count, typename T>
ZERORT_INLINE void move_on(T* param, const T* mean, const T* square, std::size_t width, T decay, T minus_eps,
                           const T (&c)[late_terms]) {
  ZERORT_INDEPENDENT
  for (std::size_t i = 0; i < width; ++i) {
    const T root = std::sqrt(square[i]);
    T moved = mean[i] / root;
    if constexpr (count == 1) {
      moved = moved * c[0];
    } else {
      const T x = minus_eps / root;
      T series = x * c[count - 1];
      for (std::size_t k = count - 2; k > 0; --k) series = (series + c[k]) * x;
      moved = moved * (series + c[0]);
    }
    param[i] = param[i] * decay - moved;
  }
}

template <typename T>
ZERORT_INLINE void scale(T* values, T factor, std::size_t width) {
  ZERORT_INDEPENDENT
  for (std::size_t i = 0; i < width; ++i) values[i] = values[i] * factor;
}

// How many terms a row needs; more than `late_terms`: some of its elements need more.
template <typename T>
ZERORT_INLINE std::size_t needed_terms(const T* mean, const T* square, std::size_t width, const double* terms,
                                       std::size_t stride, const LateNumbers& numbers) {
  bool moves = false, broken = false;
  T least = std::numeric_limits<T>::infinity();
  for (std::size_t i = 0; i < width; ++i) {
    moves |= mean[i] != T{0};
    broken |= !(square[i] >= T{0});
    least = square[i] < least ? square[i] : least;
  }
  if (!moves) return 0;
  if (broken || !std::isfinite(terms[0])) return late_terms + 1;
  const double ratio = numbers.eps / static_cast<double>(std::sqrt(least));
  double x = 1.0;
  for (std::size_t k = 1; k <= late_terms; ++k) {
    x = x * ratio;
    if (x * terms[k * stride] <= numbers.error * terms[0]) return k;
  }
  return late_terms + 1;
}

template <typename T>
ZERORT_INLINE void late_body(T* param, T* mean, T* square, const std::int64_t* ages, std::uint8_t* left,
                             std::size_t count, std::size_t width, const LateNumbers& numbers) {
  const T minus_eps = T(-numbers.eps);
  for (std::size_t row = 0; row < count; ++row, param += width, mean += width, square += width) {
    const std::size_t age = static_cast<std::size_t>(ages[row]);
    const double* terms = numbers.terms + age;
    const std::size_t needed = needed_terms(mean, square, width, terms, numbers.ages, numbers);
    left[row] = needed > late_terms;
    if (left[row]) continue;
    T c[late_terms];
    for (std::size_t k = 0; k < late_terms; ++k) c[k] = T(terms[k * numbers.ages]);
    const T decay = T(numbers.decay[age]);
    switch (needed) {
      case 0: scale(param, decay, width); break;
      case 1: move_on<1>(param, mean, square, width, decay, minus_eps, c); break;
      case 2: move_on<2>(param, mean, square, width, decay, minus_eps, c); break;
      case 3: move_on<3>(param, mean, square, width, decay, minus_eps, c); break;
      case 4: move_on<4>(param, mean, square, width, decay, minus_eps, c); break;
      case 5: move_on<5>(param, mean, square, width, decay, minus_eps, c); break;
      default: move_on<6>(param, mean, square, width, decay, minus_eps, c);
    }
    scale(mean, T(numbers.mean[age]), width);
    scale(square, T(numbers.square[age]), width);
  }
}

template <typename T>
ZERORT_INLINE void adamw_body(T* param, const T* grad, T* mean, T* square, const std::int64_t* rows, std::size_t count,
                              std::size_t width, const AdamWScalars<T>& scalars) {
  const AdamWScalars<T> s = scalars;
  const std::size_t nbytes = width * sizeof(T);
  for (std::size_t row = 0; row < count; ++row) {
    if (row + rows_ahead < count) {
      const std::size_t later = static_cast<std::size_t>(rows[row + rows_ahead]) * width;
      ask_for(reinterpret_cast<const char*>(param + later), nbytes);
      ask_for(reinterpret_cast<const char*>(mean + later), nbytes);
      ask_for(reinterpret_cast<const char*>(square + later), nbytes);
    }
    const std::size_t first = static_cast<std::size_t>(rows[row]) * width;
    T *p = param + first, *m = mean + first, *v = square + first;
    const T* gradient = grad + row * width;
    ZERORT_INDEPENDENT
    for (std::size_t i = 0; i < width; ++i) {
      const T g = gradient[i] * s.grad_scale;
      const T average = m[i] * s.beta1 + g * s.rest1;
      const T sum = v[i] * s.beta2 + (g * s.rest2) * g;
      m[i] = average;
      v[i] = sum;
      p[i] = p[i] * s.decay - (average * s.step_size) / (std::sqrt(sum) * s.root_correction + s.eps);
    }
  }
}

}  // namespace

namespace row_loops {

#define ZERORT_LATE(T)                                                                                             \
  ZERORT_CLONES void late(T* param, T* mean, T* square, const std::int64_t* ages, std::uint8_t* left,              \
                          std::size_t count, std::size_t width, const LateNumbers& numbers) {                      \
    late_body(param, mean, square, ages, left, count, width, numbers);                                             \
  }                                                                                                                \
  ZERORT_CLONES void adamw(T* param, const T* grad, T* mean, T* square, const std::int64_t* rows,                  \
                           std::size_t count, std::size_t width, const AdamWScalars<T>& s) {                       \
    adamw_body(param, grad, mean, square, rows, count, width, s);                                                  \
  }
ZERORT_LATE(float)
ZERORT_LATE(double)
#undef ZERORT_LATE

}  // namespace row_loops

void take_rows(char* out, const char* table, const std::int64_t* rows, std::size_t count, std::size_t nbytes) {
  for (std::size_t i = 0; i < std::min(rows_ahead, count); ++i)
    ask_for(table + static_cast<std::size_t>(rows[i]) * nbytes, nbytes);
  for (std::size_t i = 0; i < count; ++i) {
    if (i + rows_ahead < count) ask_for(table + static_cast<std::size_t>(rows[i + rows_ahead]) * nbytes, nbytes);
    std::memcpy(out + i * nbytes, table + static_cast<std::size_t>(rows[i]) * nbytes, nbytes);
  }
}

void put_rows(char* table, const char* values, const std::int64_t* rows, std::size_t count, std::size_t nbytes) {
  for (std::size_t i = 0; i < count; ++i) {
    if (i + rows_ahead < count) ask_for(table + static_cast<std::size_t>(rows[i + rows_ahead]) * nbytes, nbytes);
    std::memcpy(table + static_cast<std::size_t>(rows[i]) * nbytes, values + i * nbytes, nbytes);
  }
}

template <typename T>
void late_adamw(T* param, T* mean, T* square, const std::int64_t* ages, std::uint8_t* left, std::size_t count,
                std::size_t width, const LateNumbers& numbers) {
  row_loops::late(param, mean, square, ages, left, count, width, numbers);
}
template <typename T>
void adamw_rows(T* param, const T* grad, T* mean, T* square, const std::int64_t* rows, std::size_t count,
                std::size_t width, const AdamWScalars<T>& scalars) {
  row_loops::adamw(param, grad, mean, square, rows, count, width, scalars);
}
template void adamw_rows(float*, const float*, float*, float*, const std::int64_t*, std::size_t, std::size_t,
                         const AdamWScalars<float>&);
template void adamw_rows(double*, const double*, double*, double*, const std::int64_t*, std::size_t, std::size_t,
                         const AdamWScalars<double>&);
template void late_adamw(float*, float*, float*, const std::int64_t*, std::uint8_t*, std::size_t, std::size_t,
                         const LateNumbers&);
template void late_adamw(double*, double*, double*, const std::int64_t*, std::uint8_t*, std::size_t, std::size_t,
                         const LateNumbers&);

}  // namespace zerort
