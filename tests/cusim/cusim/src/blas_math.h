// The arithmetic of the emulated cuBLAS: products and sums of matrices of any layout and type.
//
// A matrix is a view with one step from row to row and one from column to column, so leading dimensions, transposes and
// vectors with increments are all the same thing. Addresses are those that a stream's worker uses.
#pragma once
#include <complex>
#include <cstddef>

namespace cusim::blas {

enum Type { kFloat = 0, kDouble = 1, kHalf = 2, kComplex = 4, kDoubleComplex = 5, kBFloat16 = 14 };  // cudaDataType's numbers

size_t type_size(int type);  // 0: unknown

struct Matrix {
  char *data = nullptr;
  int type = kFloat;
  long rows = 0, columns = 0;
  long row_step = 1, column_step = 0;  // in elements
  bool conjugate = false;
};

Matrix transposed(Matrix matrix);

using Scalar = std::complex<double>;  // holds the numbers of every type

// The type that products of these types are summed up in: `kFloat` for 16-bit ones. -1: they do not go together.
int sum_type(int a, int b, int c);

// c = alpha · a · b + beta · c; with beta 0, what c holds is not looked at. Sums run over the inner index in its order.
void multiply(Scalar alpha, const Matrix &a, const Matrix &b, Scalar beta, const Matrix &c);
// c = alpha · a + beta · b; a matrix with a factor of 0 is not looked at.
void add(Scalar alpha, const Matrix &a, Scalar beta, const Matrix &b, const Matrix &c);

}  // namespace cusim::blas
