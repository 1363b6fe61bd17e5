// PreparedCall: a collective whose arguments were found good, made again in one step: look whether the arrays are still the
// same, then take the shortcut (shortcut.h). From Python each of its steps costs as much as a small collective itself.
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "shortcut.h"

namespace nb = nanobind;

namespace zerort {
namespace {

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
    address_ = now.data();
    nbytes_ = now.nbytes();
    dtype_ = nb::getattr(array, "dtype");
  }

  // A NumPy array can change its memory, shape, dtype and writability in place.
  bool is(nb::handle array, Access access) const {
    if (!dtype_.is_valid()) return array.is_none();
    Argument now;
    if (!now.open_bytes(array, access) || now.data() != address_ || now.nbytes() != nbytes_ || now.ndim() != 1)
      return false;
    return nb::getattr(array, "dtype").is(dtype_);
  }

  Bytes bytes() const { return {static_cast<char*>(address_), nbytes_}; }

 private:
  void* address_ = nullptr;
  std::size_t nbytes_ = 0;
  nb::object dtype_;  // not valid for no array
};

class PreparedCall {
 public:
  PreparedCall(Peers& peers, CallLog& log, nb::object facts, nb::bytes tail, nb::handle source, nb::handle out,
               std::pair<std::int64_t, std::uint64_t> source_place, std::pair<std::int64_t, std::uint64_t> out_place,
               std::uint64_t slab_nbytes, int move, std::vector<Range> takes, std::vector<std::uint64_t> places,
               bool alike, std::size_t width, int dtype, int reduction)
      : log_(log), facts_(facts), source_(source), out_(out),
        shortcut_(peers,
                  {{source_place.first, source_place.second}, {out_place.first, out_place.second}, slab_nbytes, Move(move),
                   std::move(takes), std::move(places), alike, width, Dtype(dtype), Reduction(reduction)},
                  checked(tail).c_str(), source_.bytes(), out_.bytes()) {}

  // Make the call with this number, if these are still its arrays.
  int run(std::uint64_t sequence, nb::handle source, nb::handle out) {
    if (shortcut_.is_stale() || !out_.is(out, Access::write)) return kStale;
    if (!source.is(out) && !source_.is(source, Access::read)) return kStale;
    log_.begin(facts_, sequence);
    const int progress = shortcut_.run(sequence);
    if (progress == kDone) log_.end();
    return progress;
  }

 private:
  static const nb::bytes& checked(const nb::bytes& tail) {
    if (tail.size() != kHeaderBytes - sizeof(std::uint64_t))
      throw std::invalid_argument("Expected a packed header of the agreed size, without its number.");
    return tail;
  }

  CallLog& log_;
  nb::object facts_;
  Known source_, out_;
  Shortcut<WithoutGil> shortcut_;
};

}  // namespace

void bind_prepared(nb::module_& module) {
  nb::class_<CallLog>(module, "CallLog").def(nb::init<std::size_t>()).def("rows", &CallLog::rows);
  nb::class_<PreparedCall>(module, "PreparedCall")
      .def(nb::init<Peers&, CallLog&, nb::object, nb::bytes, nb::handle, nb::handle,
                    std::pair<std::int64_t, std::uint64_t>, std::pair<std::int64_t, std::uint64_t>, std::uint64_t, int,
                    std::vector<Range>, std::vector<std::uint64_t>, bool, std::size_t, int, int>(),
           nb::arg("link"), nb::arg("log"), nb::arg("facts"), nb::arg("tail"), nb::arg("source").none(),
           nb::arg("out").none(), nb::arg("source_place"), nb::arg("out_place"), nb::arg("slab_nbytes"),
           nb::arg("move"), nb::arg("takes"), nb::arg("places"), nb::arg("alike"), nb::arg("width"), nb::arg("dtype"),
           nb::arg("reduction"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("run", &PreparedCall::run, nb::arg(), nb::arg().none(), nb::arg().none());
}

}  // namespace zerort
