// The loops below know one type at a time, float or double. Half precision goes through a tile in the first-level cache
// on its way in and out, which costs nothing beside main memory and spares a loop per pair of types. Operations stand in the order of the
// NumPy forms (zerort/native/reference/optim.py): both round after each one, so the results agree to the bit.
#include "optim.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cast.h"
#include "compiler.h"
#include "masters.h"
#include "strips.h"

namespace zerort {
namespace {

constexpr std::size_t tile_numel = 2048;
template <typename T>
constexpr std::size_t strip = strip_bytes / sizeof(T);
template <typename T>
constexpr Dtype dtype_of = sizeof(T) == sizeof(double) ? Dtype::float64 : Dtype::float32;

template <typename T>
ZERORT_INLINE void adamw_body(T* param, const T* grad, T* m, T* v, std::size_t numel, const AdamWScalars<T>& scalars) {
  const AdamWScalars<T> s = scalars;  // by value: a reference could alias the arrays, and would be read again each turn
  const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
    ZERORT_INDEPENDENT
    for (std::size_t i = start; i < start + count; ++i) {
      const T g = grad[i] * s.grad_scale;
      const T average = m[i] * s.beta1 + g * s.rest1;
      const T square = v[i] * s.beta2 + (g * s.rest2) * g;
      m[i] = average;
      v[i] = square;
      param[i] = param[i] * s.decay - (average * s.step_size) / (std::sqrt(square) * s.root_correction + s.eps);
    }
  };
  in_strips<strip<T>>(numel, body, param, grad, m, v);
}

template <Momentum momentum, bool nesterov, typename T>
ZERORT_INLINE void sgd_body(T* param, const T* grad, T* buffer, std::size_t numel, const SgdScalars<T>& scalars) {
  const SgdScalars<T> s = scalars;
  const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
    ZERORT_INDEPENDENT
    for (std::size_t i = start; i < start + count; ++i) {
      const T g = grad[i] * s.grad_scale + param[i] * s.weight_decay;
      T direction = g;
      if constexpr (momentum != Momentum::none) {
        const T b = momentum == Momentum::first ? g : buffer[i] * s.momentum + g * s.rest;
        buffer[i] = b;
        direction = nesterov ? g + b * s.momentum : b;
      }
      param[i] = param[i] - direction * s.lr;
    }
  };
  if constexpr (momentum == Momentum::none)
    in_strips<strip<T>>(numel, body, param, grad);
  else
    in_strips<strip<T>>(numel, body, param, grad, buffer);
}

// NaN keeps its NaN: a broken gradient must show, not turn into "no change".
template <typename T>
ZERORT_INLINE T sign(T x) {
  return x > T{0} ? T{1} : x < T{0} ? T{-1} : x == T{0} ? T{0} : x;
}

template <typename T>
ZERORT_INLINE void lion_body(T* param, const T* grad, T* m, std::size_t numel, const LionScalars<T>& scalars) {
  const LionScalars<T> s = scalars;
  const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
    ZERORT_INDEPENDENT
    for (std::size_t i = start; i < start + count; ++i) {
      const T g = grad[i] * s.grad_scale;
      const T direction = m[i] * s.beta1 + g * s.rest1;
      param[i] = param[i] * s.decay - sign(direction) * s.lr;
      m[i] = m[i] * s.beta2 + g * s.rest2;
    }
  };
  in_strips<strip<T>>(numel, body, param, grad, m);
}

}  // namespace

namespace optim_loops {

// A function of its own for each: a template cannot be compiled for several CPUs.
#define ZERORT_SGD(T, name, momentum, nesterov)                                                              \
  ZERORT_CLONES void name(T* param, const T* grad, T* buffer, std::size_t numel, const SgdScalars<T>& s) {   \
    sgd_body<momentum, nesterov>(param, grad, buffer, numel, s);                                             \
  }
#define ZERORT_LOOPS(T)                                                                                              \
  ZERORT_CLONES void adamw(T* param, const T* grad, T* m, T* v, std::size_t numel, const AdamWScalars<T>& s) {       \
    adamw_body(param, grad, m, v, numel, s);                                                                         \
  }                                                                                                                  \
  ZERORT_CLONES void lion(T* param, const T* grad, T* m, std::size_t numel, const LionScalars<T>& s) {               \
    lion_body(param, grad, m, numel, s);                                                                             \
  }                                                                                                                  \
  ZERORT_SGD(T, sgd_none, Momentum::none, false)                                                                     \
  ZERORT_SGD(T, sgd_first, Momentum::first, false)                                                                   \
  ZERORT_SGD(T, sgd_later, Momentum::later, false)                                                                   \
  ZERORT_SGD(T, sgd_first_nesterov, Momentum::first, true)                                                           \
  ZERORT_SGD(T, sgd_later_nesterov, Momentum::later, true)
ZERORT_LOOPS(float)
ZERORT_LOOPS(double)
#undef ZERORT_LOOPS
#undef ZERORT_SGD

}  // namespace optim_loops

namespace {

// Calls step(start, numel, param, grad as T) over the range: at once if all is of that type, else tile by tile.
template <typename T, typename Step>
void for_tiles(const Update<T>& update, Step step) {
  if (update.grad_dtype == dtype_of<T> && update.copy == nullptr) {
    step(std::size_t{0}, update.numel, update.param, static_cast<const T*>(update.grad));
    return;
  }
  alignas(64) T tile[tile_numel];
  alignas(64) float masters[tile_numel];
  for (std::size_t start = 0; start < update.numel; start += tile_numel) {
    const std::size_t turn = std::min(tile_numel, update.numel - start);
    const char* grad = static_cast<const char*>(update.grad) + start * itemsize(update.grad_dtype);
    char* copy = update.copy == nullptr ? nullptr : static_cast<char*>(update.copy) + start * itemsize(update.copy_dtype);
    auto* rounded = reinterpret_cast<std::uint16_t*>(copy);  // if it is bfloat16
    std::uint16_t* remainder = update.remainder == nullptr ? nullptr : update.remainder + start;
    T* param = update.param == nullptr ? nullptr : update.param + start;
    if constexpr (dtype_of<T> == Dtype::float32) {
      if (remainder != nullptr) {
        join_master(masters, rounded, remainder, turn);
        param = masters;
      }
    }
    if (update.grad_dtype == dtype_of<T>) {
      step(start, turn, param, reinterpret_cast<const T*>(grad));
    } else {
      cast(dtype_of<T>, tile, update.grad_dtype, grad, turn);
      step(start, turn, param, tile);
    }
    if constexpr (dtype_of<T> == Dtype::float32) {
      if (copy != nullptr && update.copy_dtype == Dtype::bfloat16)
        split_master(rounded, remainder, param, turn);
      else if (copy != nullptr)
        cast(update.copy_dtype, copy, Dtype::float32, param, turn);
    }
  }
}

}  // namespace

template <typename T>
void adamw(const Update<T>& update, T* exp_avg, T* exp_avg_sq, const AdamWScalars<T>& scalars) {
  for_tiles(update, [&](std::size_t start, std::size_t numel, T* param, const T* grad) {
    optim_loops::adamw(param, grad, exp_avg + start, exp_avg_sq + start, numel, scalars);
  });
}

template <typename T>
void sgd(const Update<T>& update, T* buffer, Momentum momentum, bool nesterov, const SgdScalars<T>& scalars) {
  using Loop = void (*)(T*, const T*, T*, std::size_t, const SgdScalars<T>&);
  const Loop plain[] = {optim_loops::sgd_none, optim_loops::sgd_first, optim_loops::sgd_later};
  const Loop ahead[] = {optim_loops::sgd_none, optim_loops::sgd_first_nesterov, optim_loops::sgd_later_nesterov};
  const Loop loop = (nesterov ? ahead : plain)[static_cast<int>(momentum)];
  for_tiles(update, [&](std::size_t start, std::size_t numel, T* param, const T* grad) {
    // Without momentum there is no buffer, and no address may be computed from it.
    loop(param, grad, buffer == nullptr ? nullptr : buffer + start, numel, scalars);
  });
}

template <typename T>
void lion(const Update<T>& update, T* exp_avg, const LionScalars<T>& scalars) {
  for_tiles(update, [&](std::size_t start, std::size_t numel, T* param, const T* grad) {
    optim_loops::lion(param, grad, exp_avg + start, numel, scalars);
  });
}

#define ZERORT_OPTIMIZERS(T)                                                              \
  template void adamw(const Update<T>&, T*, T*, const AdamWScalars<T>&);                  \
  template void sgd(const Update<T>&, T*, Momentum, bool, const SgdScalars<T>&);          \
  template void lion(const Update<T>&, T*, const LionScalars<T>&);
ZERORT_OPTIMIZERS(float)
ZERORT_OPTIMIZERS(double)
#undef ZERORT_OPTIMIZERS

}  // namespace zerort
