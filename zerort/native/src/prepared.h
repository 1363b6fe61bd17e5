// Prepared: a collective whose arguments were found good, made again in one step: look whether the arrays are still the same,
// then take a shortcut, within a host (shortcut.h) or between hosts (hosts.h). From Python each step of a small collective
// costs as much as the collective itself.
#pragma once

#include <stdexcept>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "arguments.h"
#include "shortcut.h"

namespace zerort {

namespace nb = nanobind;

// The last calls, for the flight recorder: written at every call, read when something has gone wrong.
class CallLog {
 public:
  explicit CallLog(std::size_t length) : entries_(length) {}

  void begin(const nb::object& facts, std::uint64_t sequence) {
    last_ = next_;
    next_ = (next_ + 1) % entries_.size();
    entries_[last_] = {facts, sequence, now_ns(), 0};
  }
  void end() { entries_[last_].ended = now_ns(); }

  // (sequence, facts, began, ended) of each call, ended 0 while it runs; in no order.
  nb::list rows() const {
    nb::list found;
    for (const Entry& entry : entries_)
      if (entry.facts.is_valid()) found.append(nb::make_tuple(entry.sequence, entry.facts, entry.began, entry.ended));
    return found;
  }

 private:
  struct Entry {
    nb::object facts;
    std::uint64_t sequence, began, ended;
  };
  std::vector<Entry> entries_;
  std::size_t next_ = 0, last_ = 0;
};

// An array as it was when its call was checked.
class Known {
 public:
  explicit Known(nb::handle array) {
    if (array.is_none()) return;
    Argument now;
    if (!now.open_bytes(array, Access::read)) throw std::invalid_argument("Expected a contiguous array.");
    bytes_ = {static_cast<char*>(now.data()), now.nbytes()};
    for (int axis = 0; axis < now.ndim(); axis++) shape_.push_back(now.length(axis));
    dtype_ = nb::getattr(array, "dtype");
  }

  // A NumPy array can change its memory, shape, dtype and writability in place.
  bool is(nb::handle array, Access access) const {
    if (!dtype_.is_valid()) return array.is_none();
    Argument now;
    if (!now.open_bytes(array, access) || now.data() != bytes_.data || now.nbytes() != bytes_.nbytes) return false;
    if (now.ndim() != int(shape_.size())) return false;
    for (int axis = 0; axis < now.ndim(); axis++)
      if (now.length(axis) != shape_[std::size_t(axis)]) return false;
    return nb::getattr(array, "dtype").is(dtype_);
  }

  // Say whether an array holds as many numbers of the same kind, and where they lie.
  bool is_like(nb::handle array, Bytes& now) const {
    now = {nullptr, 0};
    if (!dtype_.is_valid()) return array.is_none();
    Argument given;
    if (!given.open_bytes(array, Access::read) || given.nbytes() != bytes_.nbytes) return false;
    now = {static_cast<char*>(given.data()), given.nbytes()};
    return nb::getattr(array, "dtype").is(dtype_);
  }

  Bytes bytes() const { return bytes_; }

 private:
  Bytes bytes_{nullptr, 0};
  std::vector<Py_ssize_t> shape_;
  nb::object dtype_;  // not valid for no array
};

// Arrays for results that no out was given for. One that nobody else refers to any more, strongly or weakly, and that is as it
// was made, serves again: to make an array costs a good part of a small collective, and its first touch a page fault.
class Results {
 public:
  // `make` returns a new array; `weak_references` says how many weak references there are to one.
  Results(nb::object make, nb::object weak_references) : make_(std::move(make)), weak_references_(std::move(weak_references)) {}

  bool any() const { return make_.is_valid() && !make_.is_none(); }

  nb::object next(Bytes& bytes) {
    for (Result& one : kept_) {
      if (!is_free(one.array)) continue;
      if (!one.known.is(one.array, Access::write)) one = made();  // its owner changed it before it let go
      bytes = one.known.bytes();
      return one.array;
    }
    Result fresh = made();
    bytes = fresh.known.bytes();
    if (kept_.size() < kMost && bytes.nbytes <= kMostBytes) kept_.push_back(fresh);
    return fresh.array;
  }

 private:
  struct Result {
    nb::object array;
    Known known;
  };
  static constexpr std::size_t kMost = 3;
  static constexpr std::size_t kMostBytes = 64 * 1024;  // of one: a group knows hundreds of calls

  Result made() const {
    nb::object array = make_();
    Known known(array);
    return {std::move(array), std::move(known)};
  }

  bool is_free(const nb::object& array) const {
#if defined(Py_GIL_DISABLED)
    return false;  // a count of references says nothing while other threads run
#else
    return Py_REFCNT(array.ptr()) == 1 && nb::cast<std::size_t>(weak_references_(array)) == 0;
#endif
  }

  nb::object make_, weak_references_;
  std::vector<Result> kept_;
};

// `Way` makes the call: is_stale(), take_source(), take_out(), run(sequence).
template <typename Way>
class Prepared {
 public:
  // `anywhere`: the source may lie elsewhere each time. `make`, `weak_references`: see Results.
  template <typename... Arguments>
  Prepared(CallLog& log, nb::object facts, nb::handle source, nb::handle out, bool anywhere, std::size_t width, nb::object make,
           nb::object weak_references, Arguments&&... arguments)
      : log_(log), facts_(std::move(facts)), source_(source), out_(out), results_(std::move(make), std::move(weak_references)),
        anywhere_(anywhere), width_(width), way_(std::forward<Arguments>(arguments)..., source_.bytes(), out_.bytes()) {}

  // Make the call with this number, if these are still its arrays.
  int run(std::uint64_t sequence, nb::handle source, nb::handle out) {
    if (way_.is_stale() || !out_.is(out, Access::write)) return kStale;
    if (!source.is(out) && !take_source(source)) return kStale;
    return begin(sequence);
  }

  // Make the call with a new array as its out: return that array if the call is done, (progress, array) if it is not, and
  // kStale if it was not begun.
  nb::object run_new(std::uint64_t sequence, nb::handle source) {
    if (way_.is_stale() || !results_.any() || !take_source(source)) return nb::int_(kStale);
    Bytes bytes;
    nb::object out;
    try {
      out = results_.next(bytes);
    } catch (const nb::python_error&) {
      return nb::int_(kStale);  // no memory: the call that is checked anew tells the other ranks
    }
    way_.take_out(bytes);
    const int progress = begin(sequence);
    return progress == kDone ? out : nb::make_tuple(progress, out);
  }

  Way& way() { return way_; }

 private:
  bool take_source(nb::handle source) {
    if (!anywhere_) return source_.is(source, Access::read);
    Bytes now;
    if (!source_.is_like(source, now) || reinterpret_cast<std::uintptr_t>(now.data) % width_ != 0) return false;
    way_.take_source(now);
    return true;
  }

  int begin(std::uint64_t sequence) {
    log_.begin(facts_, sequence);
    const int progress = way_.run(sequence);
    if (progress == kDone) log_.end();
    return progress;
  }

  CallLog& log_;
  nb::object facts_;
  Known source_, out_;
  Results results_;
  bool anywhere_;  // the source is staged, or nobody reads it
  std::size_t width_;
  Way way_;
};

using Place = std::pair<std::int64_t, std::uint64_t>;  // (window, offset)

// The part of a route that calls within a host and between hosts have in common, from what Python gives.
inline RouteBase route_base(Place source, Place out, std::uint64_t slab_nbytes, int move, bool alike, std::size_t width, int dtype,
                            int reduction) {
  return {{source.first, source.second}, {out.first, out.second}, slab_nbytes, Move(move), alike, width, Dtype(dtype),
          Reduction(reduction)};
}

// The bytes of a packed header without its number.
inline const char* tail_of(const nb::bytes& tail) {
  if (tail.size() != kHeaderBytes - sizeof(std::uint64_t))
    throw std::invalid_argument("Expected a packed header of the agreed size, without its number.");
  return tail.c_str();
}

}  // namespace zerort
