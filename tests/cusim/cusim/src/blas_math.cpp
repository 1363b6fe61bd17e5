#include "blas_math.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "bfloat16.h"

#pragma GCC optimize("O3")  // the rest of the emulator waits more than it computes

namespace cusim::blas {

namespace {

// The tile of c that is summed up in registers.
constexpr long kWide = 4;
template <class Number>
constexpr long kTall = 32 / sizeof(Number);

// Calls `work` with a number of the type that is stored, of those that `Number` is computed for.
template <class Work>
void as_stored(float, int type, Work work) {
  if (type == kHalf) work(_Float16{});
  else if (type == kBFloat16) work(BFloat16{});
  else work(float{});
}
template <class Number, class Work>
void as_stored(Number number, int, Work work) {
  work(number);
}

template <class Number>
Number number_of(Scalar value) {
  return (Number)value.real();
}
template <>
std::complex<float> number_of(Scalar value) {
  return std::complex<float>(value);
}
template <>
Scalar number_of(Scalar value) {
  return value;
}

template <class Real>
Real conjugate_of(Real value) {
  return value;
}
template <class Real>
std::complex<Real> conjugate_of(std::complex<Real> value) {
  return std::conj(value);
}

template <class Stored, class Number>
Stored narrow(Number value) {
  return (Stored)value;
}
template <>
BFloat16 narrow(float value) {
  return BFloat16::of(value);
}

template <class Number, class Stored>
Number load(const Matrix &matrix, long row, long column) {
  auto value = (Number)((const Stored *)matrix.data)[row * matrix.row_step + column * matrix.column_step];
  return matrix.conjugate ? conjugate_of(value) : value;
}

// Bands of `tall` rows, one behind the other, each column by column; the last one is filled up with zeros.
template <class Number>
std::vector<Number> pack(const Matrix &matrix, long tall) {
  long bands = (matrix.rows + tall - 1) / tall;
  std::vector<Number> packed(bands * tall * matrix.columns);
  as_stored(Number{}, matrix.type, [&](auto stored) {
    Number *out = packed.data();
    for (long band = 0; band < bands; band++)
      for (long column = 0; column < matrix.columns; column++)
        for (long row = band * tall; row < (band + 1) * tall; row++, out++)
          if (row < matrix.rows) *out = load<Number, decltype(stored)>(matrix, row, column);
  });
  return packed;
}

template <class Number>
struct Tile {
  Number sums[kWide][kTall<Number>] = {};

  Tile(const Number *a, const Number *b, long depth) {
    for (long p = 0; p < depth; p++, a += kTall<Number>, b += kWide)
      for (long column = 0; column < kWide; column++)
        for (long row = 0; row < kTall<Number>; row++) sums[column][row] += a[row] * b[column];
  }
};

template <class Number>
void multiply_as(Scalar alpha_given, const Matrix &a, const Matrix &b, Scalar beta_given, const Matrix &c) {
  auto alpha = number_of<Number>(alpha_given), beta = number_of<Number>(beta_given);
  constexpr long tall = kTall<Number>;
  long depth = a.columns;
  std::vector<Number> left = pack<Number>(a, tall), right = pack<Number>(transposed(b), kWide);
  as_stored(Number{}, c.type, [&](auto stored) {
    using Stored = decltype(stored);
    for (long column = 0; column < c.columns; column += kWide)
      for (long row = 0; row < c.rows; row += tall) {
        Tile<Number> tile(left.data() + row * depth, right.data() + column * depth, depth);
        for (long j = column; j < std::min(column + kWide, c.columns); j++)
          for (long i = row; i < std::min(row + tall, c.rows); i++) {
            Stored &target = ((Stored *)c.data)[i * c.row_step + j * c.column_step];
            Number value = alpha * tile.sums[j - column][i - row];
            if (beta != Number{}) value += beta * (Number)target;
            target = narrow<Stored>(value);
          }
      }
  });
}

template <class Number>
void add_as(Scalar alpha_given, const Matrix &a, Scalar beta_given, const Matrix &b, const Matrix &c) {
  auto alpha = number_of<Number>(alpha_given), beta = number_of<Number>(beta_given);
  for (long j = 0; j < c.columns; j++)
    for (long i = 0; i < c.rows; i++) {
      Number value{};
      if (alpha != Number{}) value += alpha * load<Number, Number>(a, i, j);
      if (beta != Number{}) value += beta * load<Number, Number>(b, i, j);
      ((Number *)c.data)[i * c.row_step + j * c.column_step] = value;
    }
}

template <class Work>
void as_number(int type, Work work) {
  switch (type) {
    case kDouble: return work(double{});
    case kComplex: return work(std::complex<float>{});
    case kDoubleComplex: return work(Scalar{});
    default: return work(float{});
  }
}

}  // namespace

size_t type_size(int type) {
  switch (type) {
    case kHalf:
    case kBFloat16: return 2;
    case kFloat: return 4;
    case kDouble:
    case kComplex: return 8;
    case kDoubleComplex: return 16;
    default: return 0;
  }
}

int sum_type(int a, int b, int c) {
  auto wide = [](int type) { return type == kHalf || type == kBFloat16 ? (int)kFloat : type; };
  return type_size(a) && a == b && wide(a) == wide(c) ? wide(a) : -1;
}

Matrix transposed(Matrix matrix) {
  std::swap(matrix.rows, matrix.columns);
  std::swap(matrix.row_step, matrix.column_step);
  return matrix;
}

void multiply(Scalar alpha, const Matrix &a, const Matrix &b, Scalar beta, const Matrix &c) {
  as_number(sum_type(a.type, b.type, c.type), [&](auto number) { multiply_as<decltype(number)>(alpha, a, b, beta, c); });
}

void add(Scalar alpha, const Matrix &a, Scalar beta, const Matrix &b, const Matrix &c) {
  as_number(c.type, [&](auto number) { add_as<decltype(number)>(alpha, a, beta, b, c); });
}

}  // namespace cusim::blas
