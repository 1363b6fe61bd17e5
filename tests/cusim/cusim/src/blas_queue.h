// Calls of the emulated cuBLAS as operations of a stream: what they read and write goes to the bounds and race checks.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "blas_math.h"
#include "device.h"

namespace cusim::blas {

enum Status { kOk = 0, kNotInitialized = 1, kInvalidArgument = 7, kExecutionFailed = 13, kNotEmulated = 15 };  // cublasStatus_t's

struct Handle {
  const int device = current_device();
  const void *stream = nullptr;
  int pointer_mode = 0, math_mode = 0;
  bool scalars_on_device() const { return pointer_mode == 1; }
};

// alpha and beta: taken from the host at the call, or from the device when the operation's turn has come.
struct Factors {
  const void *alpha, *beta;
  int type;
};

struct Product {
  Matrix a, b, c;  // addresses as the program gave them
};

// Where the matrices of a batch lie: `count` pointers each, in device memory.
struct Tables {
  const void *const *a, *const *b;
  void *const *c;
  int count;
};

// `name` is the call's, for findings. Each returns a Status.
int queue_products(const Handle *handle, const char *name, const Factors &factors, std::vector<Product> products);
int queue_products(const Handle *handle, const char *name, const Factors &factors, const Product &shape, const Tables &tables);
int queue_sum(const Handle *handle, const char *name, const Factors &factors, const Product &sum);
// The product of a row and a column, put into `result` (of the host: the call waits for it).
int queue_dot(const Handle *handle, const char *name, const Matrix &row, const Matrix &column, void *result);

}  // namespace cusim::blas
