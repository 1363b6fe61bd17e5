// zerort.native._kernels: the door between Python and the kernels. Each function takes its arrays, returns False (or
// None) if they are not what it can work on, and otherwise does its work without the GIL. Users do not call it: they
// call the facade (zerort/native/arrays.py, measure.py, optim.py, checksum.py).
#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "accumulate.h"
#include "arguments.h"
#include "cast.h"
#include "crc32c.h"
#include "finite.h"
#include "masters.h"
#include "memory.h"
#include "optim.h"
#include "reduce.h"
#include "square.h"

namespace nb = nanobind;

namespace zerort {

void bind_codecs(nb::module_& module);      // codecs.cpp
void bind_doorbell(nb::module_& module);    // doorbell.cpp
void bind_hosts(nb::module_& module);       // hosts.cpp
void bind_prepared(nb::module_& module);    // prepared.cpp
void bind_repeater(nb::module_& module);    // repeater.cpp
void bind_rounds(nb::module_& module);      // rounds.cpp
void bind_rows(nb::module_& module);        // row_bindings.cpp
void bind_rendezvous(nb::module_& module);  // rendezvous.cpp
void bind_wire(nb::module_& module);        // wire.cpp

namespace {

bool bind_reduce(nb::handle out, nb::handle sources, unsigned reduction) {
  const Py_ssize_t length = PySequence_Size(sources.ptr());
  if (length < 1 || reduction >= reduction_count) {
    PyErr_Clear();
    return false;
  }
  const auto count = static_cast<std::size_t>(length);
  Argument target;
  if (!target.open(out, Access::write)) return false;
  std::vector<Argument> arrays(count);
  std::vector<const void*> pointers(count);
  for (std::size_t k = 0; k < count; ++k) {
    const nb::object source = nb::steal(PySequence_GetItem(sources.ptr(), static_cast<Py_ssize_t>(k)));
    if (!source.is_valid()) {
      PyErr_Clear();
      return false;
    }
    // The buffer keeps the array alive from here on.
    if (!arrays[k].open(source, Access::read, target.dtype(), target.numel())) return false;
    if (arrays[k].overlaps(target) && !arrays[k].same_memory(target)) return false;
    pointers[k] = arrays[k].data();
  }
  const WithoutGil released(target.nbytes() * count);
  reduce(target.dtype(), static_cast<Reduction>(reduction), target.data(), pointers.data(), count, target.numel());
  return true;
}

bool bind_cast(nb::handle out, nb::handle source) {
  Argument to, from;
  if (!to.open(out, Access::write) || !from.open(source, Access::read)) return false;
  if (to.numel() != from.numel() || !castable(to.dtype(), from.dtype())) return false;
  if (to.dtype() != from.dtype() && to.overlaps(from)) return false;
  const WithoutGil released(to.nbytes() + from.nbytes());
  cast(to.dtype(), to.data(), from.dtype(), from.data(), to.numel());
  return true;
}

// Where an array's first byte lies: a fifth of what asking NumPy costs, and collectives ask for every array of every
// call.
nb::object bind_address(nb::handle array) {
  Argument argument;
  if (!argument.open_bytes(array, Access::read)) return nb::none();
  return nb::int_(reinterpret_cast<std::uintptr_t>(argument.data()));
}

bool bind_copy(nb::handle out, nb::handle source) {
  Argument to, from;
  if (!to.open(out, Access::write) || !from.open(source, Access::read, to.dtype(), to.numel())) return false;
  const WithoutGil released(to.nbytes());
  copy_bytes(to.data(), from.data(), to.nbytes());
  return true;
}

bool bind_add(nb::handle out, nb::handle source) {
  Argument to, from;
  if (!to.open(out, Access::write) || !from.open(source, Access::read)) return false;
  if (to.numel() != from.numel() || !accumulable(to.dtype(), from.dtype())) return false;
  if (to.overlaps(from) && !to.same_memory(from)) return false;
  const WithoutGil released(to.nbytes() + from.nbytes());
  accumulate(to.dtype(), to.data(), from.dtype(), from.data(), to.numel());
  return true;
}

// An index as Python knows it: -1 for "nowhere".
nb::object index_of(std::size_t index, std::size_t numel) {
  return nb::int_(index == numel ? Py_ssize_t{-1} : static_cast<Py_ssize_t>(index));
}

nb::object bind_copy_checked(nb::handle out, nb::handle source) {
  Argument to, from;
  if (!to.open(out, Access::write) || !from.open(source, Access::read)) return nb::none();
  if (to.numel() != from.numel() || !is_float(to.dtype()) || !castable(to.dtype(), from.dtype())) return nb::none();
  if (to.overlaps(from)) return nb::none();
  std::size_t found;
  {
    const WithoutGil released(to.nbytes() + from.nbytes());
    found = copy_checked(to.dtype(), to.data(), from.dtype(), from.data(), to.numel());
  }
  return index_of(found, to.numel());
}

nb::object bind_first_nonfinite(nb::handle array) {
  Argument argument;
  if (!argument.open(array, Access::read) || !is_float(argument.dtype())) return nb::none();
  std::size_t found;
  {
    const WithoutGil released(argument.nbytes());
    found = first_nonfinite(argument.dtype(), argument.data(), argument.numel());
  }
  return index_of(found, argument.numel());
}

nb::object bind_square_sum(nb::handle array) {
  Argument argument;
  if (!argument.open(array, Access::read) || !is_float(argument.dtype())) return nb::none();
  double sum;
  {
    const WithoutGil released(argument.nbytes());
    sum = square_sum(argument.dtype(), argument.data(), argument.numel());
  }
  return nb::float_(sum);
}

bool bind_square_sums(nb::handle out, nb::handle array, std::size_t block) {
  Argument sums, argument;
  if (block == 0 || !argument.open(array, Access::read) || !is_float(argument.dtype())) return false;
  const std::size_t numel = argument.numel(), count = numel / block + (numel % block != 0);
  if (!sums.open(out, Access::write, Dtype::float64, count) || sums.overlaps(argument)) return false;
  const WithoutGil released(argument.nbytes());
  auto* sum = static_cast<double*>(sums.data());
  const auto* data = static_cast<const char*>(argument.data());
  for (std::size_t start = 0; start < numel; start += block)
    *sum++ = square_sum(argument.dtype(), data + start * itemsize(argument.dtype()), std::min(block, numel - start));
  return true;
}

bool bind_touch(nb::handle array) {
  Argument argument;
  if (!argument.open_bytes(array, Access::write)) return false;
  const WithoutGil released(argument.nbytes());
  touch(argument.data(), argument.nbytes());
  return true;
}

bool bind_split_master(nb::handle param, nb::handle remainder, nb::handle master) {
  Argument whole, rounded, rest;
  if (!whole.open(master, Access::read) || whole.dtype() != Dtype::float32) return false;
  if (!rounded.open(param, Access::write, Dtype::bfloat16, whole.numel()) || rounded.overlaps(whole)) return false;
  if (!remainder.is_none() && !rest.open(remainder, Access::write, Dtype::uint16, whole.numel())) return false;
  if (rest.overlaps(whole) || rest.overlaps(rounded)) return false;
  const WithoutGil released(whole.nbytes());
  split_master(static_cast<std::uint16_t*>(rounded.data()), static_cast<std::uint16_t*>(rest.data()),
               static_cast<const float*>(whole.data()), whole.numel());
  return true;
}

bool bind_join_master(nb::handle master, nb::handle param, nb::handle remainder) {
  Argument whole, rounded, rest;
  if (!whole.open(master, Access::write) || whole.dtype() != Dtype::float32) return false;
  if (!rounded.open(param, Access::read, Dtype::bfloat16, whole.numel()) || rounded.overlaps(whole)) return false;
  if (!rest.open(remainder, Access::read, Dtype::uint16, whole.numel()) || rest.overlaps(whole)) return false;
  if (rest.overlaps(rounded)) return false;
  const WithoutGil released(whole.nbytes());
  join_master(static_cast<float*>(whole.data()), static_cast<const std::uint16_t*>(rounded.data()),
              static_cast<const std::uint16_t*>(rest.data()), whole.numel());
  return true;
}

// The arrays of one optimizer call, held, and checked against each other.
class OptimizerArguments {
 public:
  bool open(nb::handle param, nb::handle grad, nb::handle state1, nb::handle state2, nb::handle copy) {
    if (!param_.open(param, Access::write)) return false;
    is_remainder_ = param_.dtype() == Dtype::uint16;
    if (is_remainder_ && !copy_.open(copy, Access::write, Dtype::bfloat16, param_.numel())) return false;
    const Dtype dtype = is_remainder_ ? Dtype::float32 : param_.dtype();
    const std::size_t numel = param_.numel();
    if (!grad_.open(grad, Access::read) || grad_.numel() != numel || !updates_with(dtype, grad_.dtype())) return false;
    if (!state1.is_none() && !states_[0].open(state1, Access::write, dtype, numel)) return false;
    if (!state2.is_none() && !states_[1].open(state2, Access::write, dtype, numel)) return false;
    if (is_remainder_) return apart();
    if (!copy.is_none() && !(copy_.open(copy, Access::write) && copy_.numel() == numel)) return false;
    return (copy.is_none() || copies_into(dtype, copy_.dtype())) && apart();
  }

  // Calls work(T{}) without the GIL; T is the type of parameter and state.
  template <typename Work>
  void compute(Work work) const {
    const WithoutGil released(4 * param_.nbytes());
    if (param_.dtype() == Dtype::float64)
      work(double{});
    else
      work(float{});
  }

  template <typename T>
  T* state(int k) const {
    return static_cast<T*>(states_[k].data());
  }
  template <typename T>
  Update<T> update() const {
    auto* param = is_remainder_ ? nullptr : static_cast<T*>(param_.data());
    auto* remainder = is_remainder_ ? static_cast<std::uint16_t*>(param_.data()) : nullptr;
    return {param, remainder, grad_.data(), grad_.dtype(), copy_.data(), copy_.dtype(), param_.numel()};
  }

 private:
  // No two arrays share memory; only the copy may take the gradient's place, element for element.
  bool apart() const {
    const Argument* all[] = {&param_, &grad_, &states_[0], &states_[1], &copy_};
    for (int i = 0; i < 5; ++i)
      for (int j = 0; j < i; ++j)
        if (all[i]->overlaps(*all[j]) && !(i == 4 && j == 1 && !is_remainder_ && copy_.same_memory(grad_))) return false;
    return true;
  }

  bool is_remainder_ = false;                 // `param_` is the lower half of the parameters, `copy_` the upper
  Argument param_, grad_, states_[2], copy_;  // one that is None has no bytes, so it overlaps nothing
};

bool bind_adamw(nb::handle param, nb::handle grad, nb::handle exp_avg, nb::handle exp_avg_sq, nb::handle copy,
                double grad_scale, double decay, double beta1, double rest1, double beta2, double rest2,
                double root_correction, double eps, double step_size) {
  OptimizerArguments arrays;
  if (exp_avg.is_none() || exp_avg_sq.is_none() || !arrays.open(param, grad, exp_avg, exp_avg_sq, copy)) return false;
  arrays.compute([&](auto zero) {
    using T = decltype(zero);
    const AdamWScalars<T> scalars{T(grad_scale), T(decay), T(beta1), T(rest1),    T(beta2),
                                  T(rest2),      T(root_correction), T(eps), T(step_size)};
    adamw(arrays.update<T>(), arrays.state<T>(0), arrays.state<T>(1), scalars);
  });
  return true;
}

bool bind_sgd(nb::handle param, nb::handle grad, nb::handle buffer, nb::handle copy, bool first, bool nesterov,
              double grad_scale, double weight_decay, double momentum, double rest, double lr) {
  OptimizerArguments arrays;
  if (!arrays.open(param, grad, buffer, nb::none(), copy)) return false;
  const Momentum kind = buffer.is_none() ? Momentum::none : first ? Momentum::first : Momentum::later;
  arrays.compute([&](auto zero) {
    using T = decltype(zero);
    const SgdScalars<T> scalars{T(grad_scale), T(weight_decay), T(momentum), T(rest), T(lr)};
    sgd(arrays.update<T>(), arrays.state<T>(0), kind, nesterov, scalars);
  });
  return true;
}

bool bind_lion(nb::handle param, nb::handle grad, nb::handle exp_avg, nb::handle copy, double grad_scale, double decay,
               double beta1, double rest1, double beta2, double rest2, double lr) {
  OptimizerArguments arrays;
  if (exp_avg.is_none() || !arrays.open(param, grad, exp_avg, nb::none(), copy)) return false;
  arrays.compute([&](auto zero) {
    using T = decltype(zero);
    const LionScalars<T> scalars{T(grad_scale), T(decay), T(beta1), T(rest1), T(beta2), T(rest2), T(lr)};
    lion(arrays.update<T>(), arrays.state<T>(0), scalars);
  });
  return true;
}

template <bool portable>
nb::object bind_crc32c(nb::handle data, std::uint32_t value) {
  Argument bytes;
  if (!bytes.open_bytes(data, Access::read)) return nb::none();
  {
    const WithoutGil released(bytes.nbytes());
    value = crc32c(bytes.data(), bytes.nbytes(), value, portable);
  }
  return nb::int_(value);
}

bool bind_crc32c_grains(nb::handle data, std::size_t grain, nb::handle sums, nb::handle copy) {
  Argument bytes, found, into;
  if (grain == 0 || !bytes.open_bytes(data, Access::read) || !found.open_bytes(sums, Access::write)) return false;
  if (!copy.is_none() && (!into.open_bytes(copy, Access::write) || into.nbytes() < bytes.nbytes())) return false;
  if (found.nbytes() / sizeof(std::uint32_t) < (bytes.nbytes() + grain - 1) / grain) return false;
  const WithoutGil released(bytes.nbytes());
  crc32c_grains(bytes.data(), bytes.nbytes(), grain, static_cast<std::uint32_t*>(found.data()),
                copy.is_none() ? nullptr : into.data());
  return true;
}

}  // namespace
}  // namespace zerort

NB_MODULE(_kernels, m) {
  // Worker threads are daemons: at exit they may still hold a doorbell, which is not a leak to tell users of.
  nb::set_leak_warnings(false);
  // Positional only: names would cost a lookup per argument and call. None must pass, to be refused or to mean
  // "absent".
  const auto number = nb::arg();
  const auto array = nb::arg().none();
  m.def("register_dtypes", &zerort::register_dtypes);
  m.def("reduce", &zerort::bind_reduce, array, array, number);
  m.def("cast", &zerort::bind_cast, array, array);
  m.def("copy", &zerort::bind_copy, array, array);
  m.def("address", &zerort::bind_address, array);
  m.def("add", &zerort::bind_add, array, array);
  m.def("copy_checked", &zerort::bind_copy_checked, array, array);
  m.def("first_nonfinite", &zerort::bind_first_nonfinite, array);
  m.def("square_sum", &zerort::bind_square_sum, array);
  m.def("square_sums", &zerort::bind_square_sums, array, array, number);
  m.def("touch", &zerort::bind_touch, array);
  m.def("adamw", &zerort::bind_adamw, array, array, array, array, array, number, number, number, number, number, number,
        number, number, number);
  m.def("sgd", &zerort::bind_sgd, array, array, array, array, number, number, number, number, number, number, number);
  m.def("lion", &zerort::bind_lion, array, array, array, array, number, number, number, number, number, number, number);
  m.def("split_master", &zerort::bind_split_master, array, array, array);
  m.def("join_master", &zerort::bind_join_master, array, array, array);
  m.def("crc32c", &zerort::bind_crc32c<false>, array, number);
  m.def("crc32c_portable", &zerort::bind_crc32c<true>, array, number);  // for tests: what CPUs without SSE 4.2 run
  m.def("crc32c_grains", &zerort::bind_crc32c_grains, array, number, array, array);
  m.def("crc32c_combine", &zerort::crc32c_combine);
  zerort::bind_codecs(m);
  zerort::bind_doorbell(m);
  zerort::bind_rendezvous(m);
  zerort::bind_prepared(m);
  zerort::bind_repeater(m);
  zerort::bind_rows(m);
  zerort::bind_wire(m);
  zerort::bind_rounds(m);
  zerort::bind_hosts(m);
}
