// NumPy arrays as kernel arguments, through the buffer protocol: about 0.1 µs each, and it serves bfloat16, which NumPy
// exports as long as nobody asks for a format. Everything here answers yes or no and leaves no Python error behind:
// a refused call is explained in Python (zerort/native/checks.py), so that there is one set of messages.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "dtypes.h"

namespace zerort {

enum class Access { read, write };

class Argument {
 public:
  Argument() = default;
  Argument(const Argument&) = delete;
  Argument& operator=(const Argument&) = delete;
  ~Argument() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  // Hold any C-contiguous buffer.
  bool open_bytes(nanobind::handle object, Access access);
  // Hold a 1-D, contiguous, aligned NumPy array of one of our dtypes.
  bool open(nanobind::handle object, Access access);
  // The same, of a given dtype and length.
  bool open(nanobind::handle object, Access access, Dtype dtype, std::size_t numel) {
    return open(object, access) && dtype_ == dtype && this->numel() == numel;
  }

  void* data() const { return view_.buf; }
  std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }
  int ndim() const { return view_.ndim; }
  Py_ssize_t length(int axis) const { return view_.shape[axis]; }
  std::size_t numel() const { return nbytes() / itemsize(dtype_); }
  Dtype dtype() const { return dtype_; }

  bool same_memory(const Argument& other) const { return data() == other.data() && nbytes() == other.nbytes(); }
  bool overlaps(const Argument& other) const {
    const auto a = reinterpret_cast<std::uintptr_t>(data()), b = reinterpret_cast<std::uintptr_t>(other.data());
    return a < b + other.nbytes() && b < a + nbytes();
  }

 private:
  Py_buffer view_{};  // obj is null while nothing is held
  Dtype dtype_ = Dtype::uint8;
};

// Remember the dtype objects and their codes: {numpy.dtype: code}.
void register_dtypes(nanobind::dict codes);

// Let other Python threads run for as long as this lives, unless the work is so short that the hand-over costs more.
class WithoutGil {
 public:
  explicit WithoutGil(std::size_t nbytes) {
    if (nbytes > 32768) release_.emplace();
  }

 private:
  std::optional<nanobind::gil_scoped_release> release_;
};

}  // namespace zerort
