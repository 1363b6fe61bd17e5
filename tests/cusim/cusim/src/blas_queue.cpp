#include "blas_queue.h"

#include <complex>
#include <utility>

#include "memory.h"
#include "report.h"
#include "status.h"
#include "stream.h"

namespace cusim::blas {

namespace {

Scalar read_scalar(const void *pointer, int type) {
  switch (type) {
    case kDouble: return *(const double *)pointer;
    case kComplex: return *(const std::complex<float> *)pointer;
    case kDoubleComplex: return *(const Scalar *)pointer;
    default: return *(const float *)pointer;
  }
}

// What an operation touches, as far as it is known.
class Footprint {
 public:
  explicit Footprint(const char *name) : name_(name) {}

  std::vector<Access> accesses;

  // False: out of bounds, or host memory that no GPU can reach; it has been reported.
  bool reads(const void *pointer, size_t size) {
    if (!reachable(pointer, size)) return false;
    accesses.push_back(cusim::reads(pointer, size));
    return true;
  }
  bool reads(const Matrix &matrix) { return touches(matrix, false); }
  bool writes(const Matrix &matrix) { return touches(matrix, true); }

 private:
  bool reachable(const void *pointer, size_t size) {
    Kind kind;
    if (!within_bounds(pointer, size, name_, &kind)) return false;
    if (kind != Kind::kPageable) return true;
    report("pointer", text("%s gets host memory that is not pinned (%p)", name_, pointer));
    return false;
  }

  bool touches(Matrix matrix, bool write) {
    if (!matrix.rows || !matrix.columns) return true;
    if (matrix.row_step != 1) matrix = transposed(matrix);
    size_t width = type_size(matrix.type), run = matrix.row_step == 1 ? matrix.rows : 1;
    long runs = matrix.row_step == 1 ? 1 : matrix.rows;
    size_t last = (matrix.rows - 1) * matrix.row_step + (matrix.columns - 1) * matrix.column_step;
    if (!reachable(matrix.data, (last + 1) * width)) return false;
    for (long column = 0; column < matrix.columns; column++)
      for (long at = 0; at < runs; at++) {
        const char *first = matrix.data + (column * matrix.column_step + at * matrix.row_step) * width;
        add(write ? cusim::writes(first, run * width) : cusim::reads(first, run * width));
      }
    return true;
  }

  void add(const Access &access) {  // joined with the last one where they touch
    if (!accesses.empty() && accesses.back().end == access.first && accesses.back().write == access.write)
      accesses.back().end = access.end;
    else
      accesses.push_back(access);
  }

  const char *name_;
};

// alpha and beta on their way from the call to the operation.
class Taken {
 public:
  Taken(const Handle &handle, const Factors &factors) : factors_(factors), later_(handle.scalars_on_device()) {
    if (later_) return;
    alpha_ = read_scalar(factors.alpha, factors.type);
    beta_ = read_scalar(factors.beta, factors.type);
  }
  bool note(Footprint *footprint) const {
    size_t width = type_size(factors_.type);
    return !later_ || (footprint->reads(factors_.alpha, width) && footprint->reads(factors_.beta, width));
  }
  bool maybe_alpha() const { return later_ || alpha_ != 0.0; }
  bool maybe_beta() const { return later_ || beta_ != 0.0; }
  Scalar alpha() const { return later_ ? read_scalar(worker_view(factors_.alpha), factors_.type) : alpha_; }
  Scalar beta() const { return later_ ? read_scalar(worker_view(factors_.beta), factors_.type) : beta_; }

 private:
  Factors factors_;
  bool later_;
  Scalar alpha_, beta_;
};

bool note(const Product &product, const Taken &taken, Footprint *footprint) {
  if (!footprint->reads(product.a) || !footprint->reads(product.b)) return false;
  if (taken.maybe_beta() && !footprint->reads(product.c)) return false;
  return footprint->writes(product.c);
}

Matrix in_worker_view(Matrix matrix) {
  matrix.data = (char *)worker_view(matrix.data);
  return matrix;
}

void run(const Product &product, Scalar alpha, Scalar beta) {
  multiply(alpha, in_worker_view(product.a), in_worker_view(product.b), beta, in_worker_view(product.c));
}

// A broken context runs nothing.
int queue(const Handle *handle, const char *name, const Footprint &footprint, Body body) {
  StreamPointer stream = find_stream(handle->device, handle->stream);
  if (!stream || fault()) return kExecutionFailed;
  submit(stream, name, footprint.accesses, [body = std::move(body)](Operation &operation) {
    if (!fault()) body(operation);
  });
  return kOk;
}

}  // namespace

int queue_products(const Handle *handle, const char *name, const Factors &factors, std::vector<Product> products) {
  Taken taken(*handle, factors);
  Footprint footprint(name);
  if (!taken.note(&footprint)) return kInvalidArgument;
  for (const Product &product : products)
    if (!note(product, taken, &footprint)) return kInvalidArgument;
  return queue(handle, name, footprint, [=, products = std::move(products)](Operation &) {
    for (const Product &product : products) run(product, taken.alpha(), taken.beta());
  });
}

int queue_products(const Handle *handle, const char *name, const Factors &factors, const Product &shape, const Tables &tables) {
  Taken taken(*handle, factors);
  Footprint footprint(name);
  if (!taken.note(&footprint)) return kInvalidArgument;
  for (const void *table : {(const void *)tables.a, (const void *)tables.b, (const void *)tables.c})
    if (!footprint.reads(table, tables.count * sizeof(void *))) return kInvalidArgument;
  return queue(handle, name, footprint, [=](Operation &operation) {
    // A kernel may have made the table, with addresses of the worker view: those were its arguments.
    auto at = [](const void *table, int i) { return (char *)device_address(((const uintptr_t *)worker_view(table))[i]); };
    for (int i = 0; i < tables.count; i++) {
      Product product = shape;
      product.a.data = at(tables.a, i);
      product.b.data = at(tables.b, i);
      product.c.data = at(tables.c, i);
      Footprint found(name);
      if (!note(product, taken, &found)) return set_fault(kIllegalAddress);
      operation.accesses.insert(operation.accesses.end(), found.accesses.begin(), found.accesses.end());
      run(product, taken.alpha(), taken.beta());
    }
  });
}

int queue_sum(const Handle *handle, const char *name, const Factors &factors, const Product &sum) {
  Taken taken(*handle, factors);
  Footprint footprint(name);
  if (!taken.note(&footprint)) return kInvalidArgument;
  if (taken.maybe_alpha() && !footprint.reads(sum.a)) return kInvalidArgument;
  if (taken.maybe_beta() && !footprint.reads(sum.b)) return kInvalidArgument;
  if (!footprint.writes(sum.c)) return kInvalidArgument;
  return queue(handle, name, footprint, [=](Operation &) {
    add(taken.alpha(), in_worker_view(sum.a), taken.beta(), in_worker_view(sum.b), in_worker_view(sum.c));
  });
}

int queue_dot(const Handle *handle, const char *name, const Matrix &row, const Matrix &column, void *result) {
  Matrix target{(char *)result, row.type, 1, 1};
  Footprint footprint(name);
  if (!footprint.reads(row) || !footprint.reads(column)) return kInvalidArgument;
  if (handle->scalars_on_device() && !footprint.writes(target)) return kInvalidArgument;
  int status = queue(handle, name, footprint, [=](Operation &) { run({row, column, target}, 1.0, 0.0); });
  if (status == kOk && !handle->scalars_on_device()) synchronize(find_stream(handle->device, handle->stream));
  return status;
}

}  // namespace cusim::blas
