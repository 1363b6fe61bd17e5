// Blocks, changes, planes and the largest elements for Python: see blocks.h, changes.h and largest.h; the facade is zerort/native/codecs.py.
#include <nanobind/nanobind.h>

#include "arguments.h"
#include "blocks.h"
#include "changes.h"
#include "largest.h"
#include "moments.h"

namespace nb = nanobind;

namespace zerort {
namespace {

bool fit(const Argument& scales, const Argument& codes, std::size_t numel, int bits) {
  const std::size_t blocks = (numel + block_numel(bits) - 1) / block_numel(bits);
  const Dtype dtype = bits == 8 ? Dtype::float32 : Dtype::uint16, code = bits == 8 ? Dtype::int8 : Dtype::uint8;
  return scales.dtype() == dtype && scales.numel() == blocks && codes.dtype() == code &&
         codes.nbytes() == code_nbytes(bits, numel);
}

bool bind_encode_blocks(nb::handle source, nb::handle scales, nb::handle codes, int bits, std::uint64_t start,
                        bool stochastic, std::uint32_t key0, std::uint32_t key1, nb::handle base) {
  Argument from, scale, code, before;
  if ((bits != 8 && bits != 4) || start % block_numel(bits) != 0) return false;
  if (!from.open(source, Access::read) || from.dtype() != Dtype::float32) return false;
  if (!scale.open(scales, Access::write) || !code.open(codes, Access::write)) return false;
  if (!fit(scale, code, from.numel(), bits) || from.overlaps(scale) || from.overlaps(code)) return false;
  if (scale.overlaps(code)) return false;
  const float* below = nullptr;
  if (!base.is_none()) {
    if (!before.open(base, Access::read, Dtype::float32, from.numel())) return false;
    if (before.overlaps(scale) || before.overlaps(code)) return false;
    below = static_cast<const float*>(before.data());
  }
  const WithoutGil released(from.nbytes());
  encode_blocks(bits, static_cast<const float*>(from.data()), below, from.numel(), start, {stochastic, key0, key1},
                scale.data(), code.data());
  return true;
}

bool bind_decode_blocks(nb::handle out, nb::handle scales, nb::handle codes, int bits, bool adds) {
  Argument to, scale, code;
  if ((bits != 8 && bits != 4) || !to.open(out, Access::write) || to.dtype() != Dtype::float32) return false;
  if (!scale.open(scales, Access::read) || !code.open(codes, Access::read)) return false;
  if (!fit(scale, code, to.numel(), bits) || to.overlaps(scale) || to.overlaps(code)) return false;
  const WithoutGil released(to.nbytes());
  decode_blocks(bits, static_cast<float*>(to.data()), to.numel(), scale.data(), code.data(), adds);
  return true;
}

bool fit_moments(const Argument& payload, std::size_t numel) {
  const std::size_t blocks = (numel + moment_block - 1) / moment_block;
  return payload.dtype() == Dtype::uint8 && payload.nbytes() == blocks * moment_nbytes &&
         reinterpret_cast<std::uintptr_t>(payload.data()) % 4 == 0;
}

bool bind_encode_moments(nb::handle payload, nb::handle source, bool is_signed, std::uint64_t start, std::uint32_t key0,
                         std::uint32_t key1) {
  Argument from, to;
  if (start % moment_block != 0 || !from.open(source, Access::read) || from.dtype() != Dtype::float32) return false;
  if (!to.open(payload, Access::write) || !fit_moments(to, from.numel()) || to.overlaps(from)) return false;
  const WithoutGil released(from.nbytes());
  encode_moments(static_cast<std::uint8_t*>(to.data()), static_cast<const float*>(from.data()), from.numel(), is_signed,
                 start, key0, key1);
  return true;
}

bool bind_decode_moments(nb::handle out, nb::handle payload, bool is_signed) {
  Argument to, from;
  if (!to.open(out, Access::write) || to.dtype() != Dtype::float32 || !from.open(payload, Access::read)) return false;
  if (!fit_moments(from, to.numel()) || to.overlaps(from)) return false;
  const WithoutGil released(to.nbytes());
  decode_moments(static_cast<float*>(to.data()), static_cast<const std::uint8_t*>(from.data()), to.numel(), is_signed);
  return true;
}

// (changed, bytes of the gaps)
nb::object bind_find_changes(nb::handle base, nb::handle now) {
  Argument before, after;
  if (!before.open(base, Access::read) || !after.open(now, Access::read, before.dtype(), before.numel()))
    return nb::none();
  Changes found;
  {
    const WithoutGil released(before.nbytes());
    found = find_changes(before.data(), after.data(), before.numel(), itemsize(before.dtype()));
  }
  return nb::make_tuple(found.changed, found.gap_nbytes);
}

// True; False if the arrays are not those that were looked at; None if they are none to work on.
nb::object bind_write_changes(nb::handle base, nb::handle now, nb::handle positions, nb::handle values, bool bitmap) {
  Argument before, after, where, what;
  if (!before.open(base, Access::read) || !after.open(now, Access::read, before.dtype(), before.numel()))
    return nb::none();
  if (!where.open(positions, Access::write) || where.dtype() != Dtype::uint8) return nb::none();
  if (!what.open(values, Access::write) || what.dtype() != before.dtype()) return nb::none();
  const std::size_t numel = before.numel();
  if (bitmap && where.nbytes() != (numel + 7) / 8) return nb::none();
  bool fits;
  {
    const WithoutGil released(before.nbytes());
    fits = (bitmap ? write_bitmap : write_gaps)(before.data(), after.data(), numel, itemsize(before.dtype()),
                                                {what.numel(), where.nbytes()},
                                                static_cast<std::uint8_t*>(where.data()), what.data());
  }
  return nb::bool_(fits);
}

// True; False if the positions do not fit; None if these are no arrays to work on.
nb::object bind_apply_changes(nb::handle target, nb::handle positions, nb::handle values, bool bitmap) {
  Argument to, where, what;
  if (!to.open(target, Access::write)) return nb::none();
  if (!where.open(positions, Access::read) || where.dtype() != Dtype::uint8) return nb::none();
  if (!what.open(values, Access::read) || what.dtype() != to.dtype()) return nb::none();
  if (bitmap && where.nbytes() != (to.numel() + 7) / 8) return nb::bool_(false);
  bool fits;
  {
    const WithoutGil released(to.nbytes());
    fits = (bitmap ? apply_bitmap : apply_gaps)(to.data(), to.numel(), itemsize(to.dtype()),
                                                {what.numel(), where.nbytes()},
                                                static_cast<const std::uint8_t*>(where.data()), what.data());
  }
  return nb::bool_(fits);
}

bool bind_split_planes(nb::handle planes, nb::handle elements) {
  Argument to, from;
  if (!to.open(planes, Access::write) || to.dtype() != Dtype::uint8 || !from.open(elements, Access::read)) return false;
  if (to.nbytes() != from.nbytes() || to.overlaps(from)) return false;
  const WithoutGil released(from.nbytes());
  split_planes(static_cast<std::uint8_t*>(to.data()), from.data(), from.numel(), itemsize(from.dtype()));
  return true;
}

bool bind_join_planes(nb::handle elements, nb::handle planes) {
  Argument to, from;
  if (!to.open(elements, Access::write) || !from.open(planes, Access::read) || from.dtype() != Dtype::uint8) return false;
  if (to.nbytes() != from.nbytes() || to.overlaps(from)) return false;
  const WithoutGil released(from.nbytes());
  join_planes(to.data(), static_cast<const std::uint8_t*>(from.data()), to.numel(), itemsize(to.dtype()));
  return true;
}

bool bind_find_largest(nb::handle source, nb::handle positions, std::size_t block, std::size_t keep) {
  Argument from, to;
  if (block == 0 || block > 65536 || keep == 0 || keep > block) return false;
  if (!from.open(source, Access::read) || from.dtype() != Dtype::float32) return false;
  if (!to.open(positions, Access::write) || to.dtype() != Dtype::uint16 || to.overlaps(from)) return false;
  const std::size_t rest = from.numel() % block;
  if (to.numel() != from.numel() / block * keep + (rest < keep ? rest : keep)) return false;
  const WithoutGil released(from.nbytes());
  find_largest(static_cast<const float*>(from.data()), from.numel(), block, keep,
               static_cast<std::uint16_t*>(to.data()));
  return true;
}

}  // namespace

void bind_codecs(nb::module_& module) {
  const auto number = nb::arg();
  const auto array = nb::arg().none();
  module.def("encode_blocks", &bind_encode_blocks, array, array, array, number, number, number, number, number,
             array);
  module.def("decode_blocks", &bind_decode_blocks, array, array, array, number, number);
  module.def("encode_moments", &bind_encode_moments, array, array, number, number, number, number);
  module.def("decode_moments", &bind_decode_moments, array, array, number);
  module.def("find_changes", &bind_find_changes, array, array);
  module.def("write_changes", &bind_write_changes, array, array, array, array, number);
  module.def("apply_changes", &bind_apply_changes, array, array, array, number);
  module.def("split_planes", &bind_split_planes, array, array);
  module.def("join_planes", &bind_join_planes, array, array);
  module.def("find_largest", &bind_find_largest, array, array, number, number);
}

}  // namespace zerort
