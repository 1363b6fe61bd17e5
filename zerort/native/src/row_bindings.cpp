// The kernels of rows.h as Python calls them. Everything is checked here: numbers of rows, ages, lengths.
#include <nanobind/nanobind.h>

#include <algorithm>

#include "arguments.h"
#include "rows.h"

namespace nb = nanobind;

namespace zerort {
namespace {

// Hold whole numbers from 0 to below `end`.
bool open_numbers(Argument& numbers, nb::handle object, std::size_t end) {
  if (!numbers.open(object, Access::read) || numbers.dtype() != Dtype::int64) return false;
  const auto* data = static_cast<const std::int64_t*>(numbers.data());
  return std::all_of(data, data + numbers.numel(),
                     [end](std::int64_t one) { return one >= 0 && static_cast<std::uint64_t>(one) < end; });
}

// `table` holds rows of `width`, `values` as many of them as `rows` names.
template <typename Work>
bool with_rows(nb::handle values, nb::handle table, nb::handle rows, std::size_t width, bool takes, Work work) {
  Argument some, all, numbers;
  if (width == 0 || !some.open(values, takes ? Access::write : Access::read)) return false;
  if (!all.open(table, takes ? Access::read : Access::write) || all.dtype() != some.dtype()) return false;
  if (!open_numbers(numbers, rows, all.numel() / width)) return false;
  if (some.numel() != numbers.numel() * width || some.overlaps(all)) return false;
  const WithoutGil released(some.nbytes());
  work(static_cast<char*>(some.data()), static_cast<char*>(all.data()), static_cast<const std::int64_t*>(numbers.data()),
       numbers.numel(), width * itemsize(some.dtype()));
  return true;
}

bool bind_take_rows(nb::handle out, nb::handle table, nb::handle rows, std::size_t width) {
  return with_rows(out, table, rows, width, true,
                   [](char* some, const char* all, const std::int64_t* numbers, std::size_t count, std::size_t nbytes) {
                     take_rows(some, all, numbers, count, nbytes);
                   });
}

bool bind_put_rows(nb::handle table, nb::handle values, nb::handle rows, std::size_t width) {
  return with_rows(values, table, rows, width, false,
                   [](const char* some, char* all, const std::int64_t* numbers, std::size_t count, std::size_t nbytes) {
                     put_rows(all, some, numbers, count, nbytes);
                   });
}

template <typename T>
T* as(const Argument& argument) {
  return static_cast<T*>(argument.data());
}

bool bind_late_adamw(nb::handle param, nb::handle mean, nb::handle square, nb::handle ages, nb::handle left,
                     nb::handle decays, nb::handle means, nb::handle squares, nb::handle terms, double eps,
                     double error) {
  Argument p, m, v, old, marks, by_age[4];
  if (!p.open(param, Access::write) || !(p.dtype() == Dtype::float32 || p.dtype() == Dtype::float64)) return false;
  if (!m.open(mean, Access::write, p.dtype(), p.numel()) || !v.open(square, Access::write, p.dtype(), p.numel()))
    return false;
  if (!by_age[0].open(decays, Access::read) || by_age[0].dtype() != Dtype::float64) return false;
  const std::size_t kept = by_age[0].numel();
  if (!by_age[1].open(means, Access::read, Dtype::float64, kept)) return false;
  if (!by_age[2].open(squares, Access::read, Dtype::float64, kept)) return false;
  if (!by_age[3].open(terms, Access::read, Dtype::float64, kept * (late_terms + 1))) return false;
  if (!open_numbers(old, ages, kept)) return false;
  const std::size_t count = old.numel();
  if (!marks.open(left, Access::write, Dtype::uint8, count)) return false;
  if (count == 0) return p.numel() == 0;
  if (p.numel() % count != 0 || p.overlaps(m) || p.overlaps(v) || m.overlaps(v)) return false;
  const WithoutGil released(3 * p.nbytes());
  const LateNumbers numbers{as<double>(by_age[0]), as<double>(by_age[1]), as<double>(by_age[2]),
                            as<double>(by_age[3]), kept,                  eps, error};
  const auto* missed = as<std::int64_t>(old);
  const std::size_t width = p.numel() / count;
  if (p.dtype() == Dtype::float32)
    late_adamw(as<float>(p), as<float>(m), as<float>(v), missed, as<std::uint8_t>(marks), count, width, numbers);
  else
    late_adamw(as<double>(p), as<double>(m), as<double>(v), missed, as<std::uint8_t>(marks), count, width, numbers);
  return true;
}

bool bind_adamw_rows(nb::handle param, nb::handle grad, nb::handle mean, nb::handle square, nb::handle rows,
                     std::size_t width, double grad_scale, double decay, double beta1, double rest1, double beta2,
                     double rest2, double root_correction, double eps, double step_size) {
  Argument p, g, m, v, numbers;
  if (width == 0 || !p.open(param, Access::write)) return false;
  if (!(p.dtype() == Dtype::float32 || p.dtype() == Dtype::float64)) return false;
  if (!m.open(mean, Access::write, p.dtype(), p.numel()) || !v.open(square, Access::write, p.dtype(), p.numel()))
    return false;
  if (!open_numbers(numbers, rows, p.numel() / width)) return false;
  if (!g.open(grad, Access::read, p.dtype(), numbers.numel() * width)) return false;
  if (p.overlaps(m) || p.overlaps(v) || m.overlaps(v) || g.overlaps(p) || g.overlaps(m) || g.overlaps(v)) return false;
  const WithoutGil released(4 * g.nbytes());
  const auto update = [&](auto zero) {
    using T = decltype(zero);
    const AdamWScalars<T> scalars{T(grad_scale), T(decay), T(beta1), T(rest1),    T(beta2),
                                  T(rest2),      T(root_correction), T(eps), T(step_size)};
    adamw_rows(as<T>(p), as<const T>(g), as<T>(m), as<T>(v), as<const std::int64_t>(numbers), numbers.numel(), width,
               scalars);
  };
  if (p.dtype() == Dtype::float32)
    update(float{});
  else
    update(double{});
  return true;
}

}  // namespace

void bind_rows(nb::module_& module) {
  const auto number = nb::arg();
  const auto array = nb::arg().none();
  module.def("take_rows", &bind_take_rows, array, array, array, number);
  module.def("put_rows", &bind_put_rows, array, array, array, number);
  module.def("adamw_rows", &bind_adamw_rows, array, array, array, array, array, number, number, number, number, number,
             number, number, number, number, number);
  module.def("late_adamw", &bind_late_adamw, array, array, array, array, array, array, array, array, array, number,
             number);
}

}  // namespace zerort
