// The loops below know float32 only. Half precision goes through a tile in the first-level cache on its way in and out,
// which costs nothing beside main memory and spares a loop per pair of types. Operations stand in the order of the
// NumPy forms (zerort/native/reference/optim.py): both round after each one, so the results agree to the bit.
#include "optim.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cast.h"
#include "compiler.h"
#include "strips.h"

namespace zerort {
namespace {

constexpr std::size_t tile_numel = 2048;
constexpr std::size_t strip = strip_bytes / sizeof(float);

ZERORT_INLINE void adamw_body(float* param, const float* grad, float* m, float* v, std::size_t numel,
                              const AdamWScalars& scalars) {
  const AdamWScalars s = scalars;  // by value: a reference could alias the arrays, and would be read again each turn
  const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
    ZERORT_INDEPENDENT
    for (std::size_t i = start; i < start + count; ++i) {
      const float g = grad[i] * s.grad_scale;
      const float average = m[i] * s.beta1 + g * s.rest1;
      const float square = v[i] * s.beta2 + (g * s.rest2) * g;
      m[i] = average;
      v[i] = square;
      param[i] = param[i] * s.decay - (average * s.step_size) / (std::sqrt(square) * s.root_correction + s.eps);
    }
  };
  in_strips<strip>(numel, body, param, grad, m, v);
}

template <Momentum momentum, bool nesterov>
ZERORT_INLINE void sgd_body(float* param, const float* grad, float* buffer, std::size_t numel,
                            const SgdScalars& scalars) {
  const SgdScalars s = scalars;
  const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
    ZERORT_INDEPENDENT
    for (std::size_t i = start; i < start + count; ++i) {
      const float g = grad[i] * s.grad_scale + param[i] * s.weight_decay;
      float direction = g;
      if constexpr (momentum != Momentum::none) {
        const float b = momentum == Momentum::first ? g : buffer[i] * s.momentum + g * s.rest;
        buffer[i] = b;
        direction = nesterov ? g + b * s.momentum : b;
      }
      param[i] = param[i] - direction * s.lr;
    }
  };
  if constexpr (momentum == Momentum::none)
    in_strips<strip>(numel, body, param, grad);
  else
    in_strips<strip>(numel, body, param, grad, buffer);
}

// NaN keeps its NaN: a broken gradient must show, not turn into "no change".
ZERORT_INLINE float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? 0.0f : x; }

ZERORT_INLINE void lion_body(float* param, const float* grad, float* m, std::size_t numel, const LionScalars& scalars) {
  const LionScalars s = scalars;
  const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
    ZERORT_INDEPENDENT
    for (std::size_t i = start; i < start + count; ++i) {
      const float g = grad[i] * s.grad_scale;
      const float direction = m[i] * s.beta1 + g * s.rest1;
      param[i] = param[i] * s.decay - sign(direction) * s.lr;
      m[i] = m[i] * s.beta2 + g * s.rest2;
    }
  };
  in_strips<strip>(numel, body, param, grad, m);
}

}  // namespace

namespace optim_loops {

ZERORT_CLONES void adamw(float* param, const float* grad, float* m, float* v, std::size_t numel,
                         const AdamWScalars& s) {
  adamw_body(param, grad, m, v, numel, s);
}

ZERORT_CLONES void lion(float* param, const float* grad, float* m, std::size_t numel, const LionScalars& s) {
  lion_body(param, grad, m, numel, s);
}

#define ZERORT_SGD(name, momentum, nesterov)                                                                         \
  ZERORT_CLONES void name(float* param, const float* grad, float* buffer, std::size_t numel, const SgdScalars& s) {  \
    sgd_body<momentum, nesterov>(param, grad, buffer, numel, s);                                                     \
  }
ZERORT_SGD(sgd_none, Momentum::none, false)
ZERORT_SGD(sgd_first, Momentum::first, false)
ZERORT_SGD(sgd_later, Momentum::later, false)
ZERORT_SGD(sgd_first_nesterov, Momentum::first, true)
ZERORT_SGD(sgd_later_nesterov, Momentum::later, true)
#undef ZERORT_SGD

}  // namespace optim_loops

namespace {

// Calls step(start, numel, grad as float32) over the range: at once if all is float32, else tile by tile.
template <typename Step>
void for_tiles(const Update& update, Step step) {
  if (update.grad_dtype == Dtype::float32 && update.copy == nullptr) {
    step(std::size_t{0}, update.numel, static_cast<const float*>(update.grad));
    return;
  }
  alignas(64) float tile[tile_numel];
  for (std::size_t start = 0; start < update.numel; start += tile_numel) {
    const std::size_t turn = std::min(tile_numel, update.numel - start);
    const char* grad = static_cast<const char*>(update.grad) + start * itemsize(update.grad_dtype);
    if (update.grad_dtype == Dtype::float32) {
      step(start, turn, reinterpret_cast<const float*>(grad));
    } else {
      cast(Dtype::float32, tile, update.grad_dtype, grad, turn);
      step(start, turn, tile);
    }
    if (update.copy != nullptr) {
      char* copy = static_cast<char*>(update.copy) + start * itemsize(update.copy_dtype);
      cast(update.copy_dtype, copy, Dtype::float32, update.param + start, turn);
    }
  }
}

}  // namespace

void adamw(const Update& update, float* exp_avg, float* exp_avg_sq, const AdamWScalars& scalars) {
  for_tiles(update, [&](std::size_t start, std::size_t numel, const float* grad) {
    optim_loops::adamw(update.param + start, grad, exp_avg + start, exp_avg_sq + start, numel, scalars);
  });
}

void sgd(const Update& update, float* buffer, Momentum momentum, bool nesterov, const SgdScalars& scalars) {
  auto loop = optim_loops::sgd_none;
  if (momentum == Momentum::first) loop = nesterov ? optim_loops::sgd_first_nesterov : optim_loops::sgd_first;
  if (momentum == Momentum::later) loop = nesterov ? optim_loops::sgd_later_nesterov : optim_loops::sgd_later;
  for_tiles(update, [&](std::size_t start, std::size_t numel, const float* grad) {
    // Without momentum there is no buffer, and no address may be computed from it.
    loop(update.param + start, grad, buffer == nullptr ? nullptr : buffer + start, numel, scalars);
  });
}

void lion(const Update& update, float* exp_avg, const LionScalars& scalars) {
  for_tiles(update, [&](std::size_t start, std::size_t numel, const float* grad) {
    optim_loops::lion(update.param + start, grad, exp_avg + start, numel, scalars);
  });
}

}  // namespace zerort
