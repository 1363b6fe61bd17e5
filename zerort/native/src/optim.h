// Fused optimizer steps over 1-D ranges: float32 state in place, gradient in float32 or half precision, and optionally
// a half-precision copy of the new parameter. The scalars come ready from Python (zerort/native/scalars.py), so that
// the NumPy forms work with the very same ones.
#pragma once

#include <cstddef>

#include "dtypes.h"

namespace zerort {

// The arrays that every optimizer has. `copy` may be null, and may be the gradient's own memory.
struct Update {
  float* param;
  const void* grad;
  Dtype grad_dtype;
  void* copy;
  Dtype copy_dtype;
  std::size_t numel;
};

struct AdamWScalars {
  float grad_scale, decay, beta1, rest1, beta2, rest2, root_correction, eps, step_size;
};

enum class Momentum { none, first, later };

struct SgdScalars {
  float grad_scale, weight_decay, momentum, rest, lr;
};

struct LionScalars {
  float grad_scale, decay, beta1, rest1, beta2, rest2, lr;
};

void adamw(const Update& update, float* exp_avg, float* exp_avg_sq, const AdamWScalars& scalars);
void sgd(const Update& update, float* buffer, Momentum momentum, bool nesterov, const SgdScalars& scalars);
void lion(const Update& update, float* exp_avg, const LionScalars& scalars);

}  // namespace zerort
