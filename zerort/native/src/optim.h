// Fused optimizer steps over 1-D ranges, in place: parameter and state of one type T, which is what is computed in.
//
//   T        gradient                      copy of the new parameter
//   float    float32, bfloat16, float16    bfloat16, float16, or none
//   double   float64                       none
//
// A float parameter may also come in two halves: `remainder`, and the bfloat16 `copy` (masters.h); then `param` is null.
//
// The scalars come ready from Python (zerort/native/scalars.py), so that the NumPy forms work with the very same ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtypes.h"

namespace zerort {

inline bool updates_with(Dtype param, Dtype grad) {
  return param == Dtype::float32 ? grad == param || is_half(grad) : param == Dtype::float64 && grad == param;
}
inline bool copies_into(Dtype param, Dtype copy) { return param == Dtype::float32 && is_half(copy); }

// The arrays that every optimizer has. `copy` may be null, and may be the gradient's own memory.
template <typename T>
struct Update {
  T* param;
  std::uint16_t* remainder;
  const void* grad;
  Dtype grad_dtype;
  void* copy;
  Dtype copy_dtype;
  std::size_t numel;
};

template <typename T>
struct AdamWScalars {
  T grad_scale, decay, beta1, rest1, beta2, rest2, root_correction, eps, step_size;
};

enum class Momentum { none, first, later };

template <typename T>
struct SgdScalars {
  T grad_scale, weight_decay, momentum, rest, lr;
};

template <typename T>
struct LionScalars {
  T grad_scale, decay, beta1, rest1, beta2, rest2, lr;
};

template <typename T>
void adamw(const Update<T>& update, T* exp_avg, T* exp_avg_sq, const AdamWScalars<T>& scalars);
template <typename T>
void sgd(const Update<T>& update, T* buffer, Momentum momentum, bool nesterov, const SgdScalars<T>& scalars);
template <typename T>
void lion(const Update<T>& update, T* exp_avg, const LionScalars<T>& scalars);

}  // namespace zerort
