// cuBLAS's API, as far as CuPy's products and transposed copies need it: matrices are column by column, as in Fortran.
#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "blas_queue.h"

using namespace cusim;
using namespace cusim::blas;

namespace {

struct Operand {
  const void *data;
  int type;
  int leading;  // elements from column to column
  long long stride = 0;  // elements from one matrix of a batch to the next
};

// op(operand), `rows` by `columns`: operation 0 as it is, 1 transposed, 2 also conjugated.
Matrix view(const Operand &operand, int operation, long rows, long columns) {
  Matrix matrix{(char *)operand.data, operand.type, rows, columns, 1, operand.leading, operation == 2};
  if (operation != 0) std::swap(matrix.row_step, matrix.column_step);
  return matrix;
}

bool fits(const Operand &operand, int operation, long rows, long columns) {
  return operation >= 0 && operation <= 2 && operand.leading >= std::max(1L, operation ? columns : rows);
}

// The n-th of a batch.
Matrix nth(Matrix matrix, const Operand &operand, long n) {
  matrix.data += n * operand.stride * (long)type_size(operand.type);
  return matrix;
}

struct Shape {
  int operation_a, operation_b;
  int m, n, k;
};

int check(const Handle *handle, const Shape &shape, const Operand &a, const Operand &b, const Operand &c) {
  if (!handle) return kNotInitialized;
  if (sum_type(a.type, b.type, c.type) < 0) return kNotEmulated;
  bool sizes = std::min({shape.m, shape.n, shape.k}) >= 0 && fits(a, shape.operation_a, shape.m, shape.k) &&
               fits(b, shape.operation_b, shape.k, shape.n) && fits(c, 0, shape.m, shape.n);
  return sizes ? kOk : kInvalidArgument;
}

Product product_of(const Shape &shape, const Operand &a, const Operand &b, const Operand &c) {
  return {view(a, shape.operation_a, shape.m, shape.k), view(b, shape.operation_b, shape.k, shape.n), view(c, 0, shape.m, shape.n)};
}

int gemm(const Handle *handle, const char *name, const Shape &shape, const void *alpha, const Operand &a, const Operand &b,
         const void *beta, const Operand &c, int count = 1) {
  if (int status = check(handle, shape, a, b, c)) return status;
  if (!shape.m || !shape.n) return kOk;
  Product first = product_of(shape, a, b, c);
  std::vector<Product> products;
  for (long i = 0; i < count; i++) products.push_back({nth(first.a, a, i), nth(first.b, b, i), nth(first.c, c, i)});
  return queue_products(handle, name, {alpha, beta, sum_type(a.type, b.type, c.type)}, products);
}

int gemm_tables(const Handle *handle, const char *name, const Shape &shape, const void *alpha, const Operand &a, const Operand &b,
                const void *beta, const Operand &c, int count) {
  if (int status = check(handle, shape, a, b, c)) return status;
  if (!shape.m || !shape.n || !count) return kOk;
  Tables tables{(const void *const *)a.data, (const void *const *)b.data, (void *const *)c.data, count};
  return queue_products(handle, name, {alpha, beta, c.type}, product_of(shape, a, b, c), tables);
}

// Sums in float or double, as the types of the matrices ask for; no half-precision sums. A type of data may stand for it.
bool can_compute(int compute, int type) {
  bool wide = type == kDouble || type == kDoubleComplex;
  switch (compute) {
    case 70:  // CUBLAS_COMPUTE_64F, pedantic or not
    case 71:
    case kDouble:
    case kDoubleComplex: return wide;
    case 68:  // CUBLAS_COMPUTE_32F, pedantic or not; with inputs rounded on the way, which here they are not
    case 69:
    case 74:
    case 75:
    case 77:
    case kFloat:
    case kComplex: return !wide;
    default: return false;
  }
}

int gemv(const Handle *handle, const char *name, int type, int operation, int m, int n, const void *alpha, const Operand &a,
         const void *x, int x_step, const void *beta, void *y, int y_step) {
  if (!handle) return kNotInitialized;
  if (x_step < 1 || y_step < 1) return kNotEmulated;
  if (m < 0 || n < 0 || !fits(a, 0, m, n) || operation < 0 || operation > 2) return kInvalidArgument;
  long rows = operation ? n : m, depth = operation ? m : n;
  if (!rows) return kOk;
  Matrix column{(char *)x, type, depth, 1, x_step, 0}, target{(char *)y, type, rows, 1, y_step, 0};
  return queue_products(handle, name, {alpha, beta, type}, {{view(a, operation, rows, depth), column, target}});
}

int geam(const Handle *handle, const char *name, const Shape &shape, const void *alpha, const Operand &a, const void *beta,
         const Operand &b, const Operand &c) {
  if (!handle) return kNotInitialized;
  bool sizes = shape.m >= 0 && shape.n >= 0 && fits(a, shape.operation_a, shape.m, shape.n) &&
               fits(b, shape.operation_b, shape.m, shape.n) && fits(c, 0, shape.m, shape.n);
  if (!sizes) return kInvalidArgument;
  Product sum{view(a, shape.operation_a, shape.m, shape.n), view(b, shape.operation_b, shape.m, shape.n), view(c, 0, shape.m, shape.n)};
  return queue_sum(handle, name, {alpha, beta, c.type}, sum);
}

int dot(const Handle *handle, const char *name, int type, int n, const void *x, int x_step, const void *y, int y_step, void *result,
        bool conjugate) {
  if (!handle) return kNotInitialized;
  if (n < 0 || x_step < 1 || y_step < 1) return kNotEmulated;
  return queue_dot(handle, name, {(char *)x, type, 1, n, 0, x_step, conjugate}, {(char *)y, type, n, 1, y_step, 0}, result);
}

int not_emulated(const char *name) {
  fprintf(stderr, "cusim: %s is not emulated (see tests/cusim/README.md).\n", name);
  return kNotEmulated;
}

}  // namespace

#define API extern "C" int
API cublasCreate_v2(Handle **out) { return *out = new Handle, kOk; }
API cublasDestroy_v2(Handle *handle) { return delete handle, kOk; }
API cublasGetVersion_v2(Handle *, int *version) { return *version = 120900, kOk; }
API cublasSetStream_v2(Handle *handle, void *stream) { return handle->stream = stream, kOk; }
API cublasGetStream_v2(Handle *handle, const void **stream) { return *stream = handle->stream, kOk; }
API cublasSetPointerMode_v2(Handle *handle, int mode) { return handle->pointer_mode = mode, kOk; }
API cublasGetPointerMode_v2(Handle *handle, int *mode) { return *mode = handle->pointer_mode, kOk; }
API cublasSetMathMode(Handle *handle, int mode) { return handle->math_mode = mode, kOk; }
API cublasGetMathMode(Handle *handle, int *mode) { return *mode = handle->math_mode, kOk; }

API cublasGemmStridedBatchedEx(Handle *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type,
                               int lda, long long stride_a, const void *b, int b_type, int ldb, long long stride_b, const void *beta,
                               void *c, int c_type, int ldc, long long stride_c, int count, int compute, int) {
  if (!can_compute(compute, a_type)) return kNotEmulated;
  return gemm(handle, "cublasGemmStridedBatchedEx", {op_a, op_b, m, n, k}, alpha, {a, a_type, lda, stride_a}, {b, b_type, ldb, stride_b},
              beta, {c, c_type, ldc, stride_c}, count);
}
API cublasGemmEx(Handle *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type, int lda,
                 const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc, int compute, int) {
  if (!can_compute(compute, a_type)) return kNotEmulated;
  return gemm(handle, "cublasGemmEx", {op_a, op_b, m, n, k}, alpha, {a, a_type, lda}, {b, b_type, ldb}, beta, {c, c_type, ldc});
}
API cublasSgemmEx(Handle *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type, int lda,
                  const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc) {
  if (!can_compute(kFloat, a_type)) return kNotEmulated;
  return gemm(handle, "cublasSgemmEx", {op_a, op_b, m, n, k}, alpha, {a, a_type, lda}, {b, b_type, ldb}, beta, {c, c_type, ldc});
}

// What there is for each of the four types.
#define FOR_TYPE(letter, type)                                                                                                     \
  API cublas##letter##gemm_v2(Handle *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int lda,  \
                              const void *b, int ldb, const void *beta, void *c, int ldc) {                                        \
    return gemm(handle, "cublas" #letter "gemm", {op_a, op_b, m, n, k}, alpha, {a, type, lda}, {b, type, ldb}, beta,               \
                {c, type, ldc});                                                                                                   \
  }                                                                                                                                \
  API cublas##letter##gemmStridedBatched(Handle *handle, int op_a, int op_b, int m, int n, int k, const void *alpha,               \
                                         const void *a, int lda, long long stride_a, const void *b, int ldb, long long stride_b,   \
                                         const void *beta, void *c, int ldc, long long stride_c, int count) {                      \
    return gemm(handle, "cublas" #letter "gemmStridedBatched", {op_a, op_b, m, n, k}, alpha, {a, type, lda, stride_a},             \
                {b, type, ldb, stride_b}, beta, {c, type, ldc, stride_c}, count);                                                  \
  }                                                                                                                                \
  API cublas##letter##gemmBatched(Handle *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,       \
                                  int lda, const void *b, int ldb, const void *beta, void *c, int ldc, int count) {                \
    return gemm_tables(handle, "cublas" #letter "gemmBatched", {op_a, op_b, m, n, k}, alpha, {a, type, lda}, {b, type, ldb}, beta, \
                       {c, type, ldc}, count);                                                                                     \
  }                                                                                                                                \
  API cublas##letter##gemv_v2(Handle *handle, int operation, int m, int n, const void *alpha, const void *a, int lda,              \
                              const void *x, int x_step, const void *beta, void *y, int y_step) {                                  \
    return gemv(handle, "cublas" #letter "gemv", type, operation, m, n, alpha, {a, type, lda}, x, x_step, beta, y, y_step);        \
  }                                                                                                                                \
  API cublas##letter##geam(Handle *handle, int op_a, int op_b, int m, int n, const void *alpha, const void *a, int lda,            \
                           const void *beta, const void *b, int ldb, void *c, int ldc) {                                           \
    return geam(handle, "cublas" #letter "geam", {op_a, op_b, m, n, 0}, alpha, {a, type, lda}, beta, {b, type, ldb},               \
                {c, type, ldc});                                                                                                   \
  }
FOR_TYPE(S, kFloat)
FOR_TYPE(D, kDouble)
FOR_TYPE(C, kComplex)
FOR_TYPE(Z, kDoubleComplex)

#define DOT(name, type, conjugate)                                                                                     \
  API cublas##name##_v2(Handle *handle, int n, const void *x, int x_step, const void *y, int y_step, void *result) {   \
    return dot(handle, "cublas" #name, type, n, x, x_step, y, y_step, result, conjugate);                              \
  }
DOT(Sdot, kFloat, false)
DOT(Ddot, kDouble, false)
DOT(Cdotu, kComplex, false)
DOT(Cdotc, kComplex, true)
DOT(Zdotu, kDoubleComplex, false)
DOT(Zdotc, kDoubleComplex, true)

// What CuPy's module is linked to besides: it does not load unless these are there.
#define MISSING(name) \
  API cublas##name() { return not_emulated("cublas" #name); }
#define MISSING_2(of, S, D) MISSING(S##of) MISSING(D##of)
#define MISSING_4(of) MISSING_2(of, S, D) MISSING_2(of, C, Z)
MISSING_4(axpy_v2)
MISSING_4(dgmm)
MISSING_4(getrfBatched)
MISSING_4(getriBatched)
MISSING_4(getrsBatched)
MISSING_4(scal_v2)
MISSING_4(syrk_v2)
MISSING_4(trsmBatched)
MISSING_4(trsm_v2)
MISSING_2(asum_v2, S, D)
MISSING_2(asum_v2, Sc, Dz)
MISSING_2(nrm2_v2, S, D)
MISSING_2(nrm2_v2, Sc, Dz)
MISSING_2(amax_v2, Is, Id)
MISSING_2(amax_v2, Ic, Iz)
MISSING_2(amin_v2, Is, Id)
MISSING_2(amin_v2, Ic, Iz)
MISSING_2(scal_v2, Cs, Zd)
MISSING_2(ger_v2, S, D)
MISSING_2(geru_v2, C, Z)
MISSING_2(gerc_v2, C, Z)
MISSING_2(sbmv_v2, S, D)
MISSING_2(tpttr, S, D)
MISSING_2(trttp, S, D)
