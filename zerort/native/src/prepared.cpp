// PreparedCall: a collective whose arguments were found good, made again in one step: look whether the arrays are still the
// same, meet, compare, move, part. From Python each of these steps costs as much as a small collective itself.
//
// Only what needs no more than the others' windows is done here. For anything else (a rank that does not come soon, calls
// that differ, arrays in private memory) it returns how far it came, and zerort/comm/transports/node/transport.py goes on from there. What is
// decided here is decided there in the same way: ranks of one meeting may take either path.
#include <cstring>
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "memory.h"
#include "peers.h"

namespace nb = nanobind;

namespace zerort {
namespace {

constexpr std::int64_t kStaging = 0;  // the window of the slabs
constexpr double kPatience = 2e-3;    // seconds; whoever must wait longer looks around from Python meanwhile

// How far a call came; with a Status added, unless it is done or was not begun.
constexpr int kDone = 0, kStale = 1, kMeeting = 8, kParting = 16;

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

  char* data() const { return static_cast<char*>(address_); }
  std::size_t nbytes() const { return nbytes_; }

 private:
  void* address_ = nullptr;
  std::size_t nbytes_ = 0;
  nb::object dtype_;  // not valid for no array
};

enum class Move { nothing, copy, reduce, all_reduce };

using Range = std::pair<std::uint64_t, std::uint64_t>;

class PreparedCall {
 public:
  PreparedCall(Peers& peers, CallLog& log, nb::object facts, nb::bytes tail, nb::handle source, nb::handle out,
               std::pair<std::int64_t, std::uint64_t> source_place, std::pair<std::int64_t, std::uint64_t> out_place,
               std::uint64_t slab_nbytes, int move, std::vector<Range> takes, std::vector<std::uint64_t> places,
               bool alike, std::size_t width, int dtype, int reduction)
      : peers_(peers), log_(log), facts_(facts), source_(source), out_(out),
        source_place_{source_place.first, source_place.second}, out_place_{out_place.first, out_place.second},
        slab_nbytes_(slab_nbytes), version_(peers.version()), move_(Move(move)), takes_(takes), places_(places),
        alike_(alike), width_(width), dtype_(Dtype(dtype)), reduction_(Reduction(reduction)) {
    if (tail.size() != kHeaderBytes - sizeof(std::uint64_t))
      throw std::invalid_argument("Expected a packed header of the agreed size, without its number.");
    std::memcpy(header_ + sizeof(std::uint64_t), tail.c_str(), tail.size());
  }

  // Make the call with this number, if these are still its arrays.
  int run(std::uint64_t sequence, nb::handle source, nb::handle out) {
    if (version_ != peers_.version() || !out_.is(out, Access::write)) return kStale;
    if (!source.is(out) && !source_.is(source, Access::read)) return kStale;
    log_.begin(facts_, sequence);
    std::memcpy(header_, &sequence, sizeof sequence);  // little-endian, as zerort/comm/guard/call.py packs it
    peers_.show(header_, slab_nbytes_ != 0 ? staged() : source_place_, out_place_);
    const Status met = come(true);
    if (met != Status::met) return kMeeting + int(met);
    if (move_ != Move::nothing) {
      if (!readable()) return kMeeting + int(Status::met);
      const bool parting = move_ == Move::all_reduce || (alike_ && peers_.one_out()) || !peers_.all_sources_in(kStaging);
      take();
      if (parting) {
        const Status parted = come(false);
        if (parted != Status::met) return kParting + int(parted);
      }
    }
    log_.end();
    return kDone;
  }

 private:
  // Meet, or part. The GIL is given away only if someone must be waited for.
  Status come(bool comparing) {
    peers_.arrive(comparing);
    if (peers_.glance()) return peers_.compare();
    const nb::gil_scoped_release release;
    return peers_.wait(kPatience);
  }

  // Copy the source into the half of the slab whose turn it is, and say where that is.
  Location staged() {
    peers_.half ^= 1;
    const Location place = {kStaging, source_place_.offset + std::uint64_t(peers_.half) * slab_nbytes_};
    std::memcpy(peers_.mapped(place), source_.data(), source_.nbytes());
    return place;
  }

  bool readable() const {
    return peers_.sources_in_windows() && (move_ != Move::all_reduce || peers_.outs_in_windows());
  }

  void take() {
    const auto& [first, count] = takes_[std::size_t(peers_.rank())];
    const WithoutGil released((move_ == Move::copy ? out_.nbytes() : count * width_ * takes_.size()));
    if (move_ == Move::copy && alike_ && peers_.one_out()) {
      copy_from(peers_.rank());  // every rank writes its own part of the one gathered array
    } else if (move_ == Move::copy) {
      for (int step = 0; step < peers_.size(); step++)  // everybody starts at home: no two queue at one rank's memory
        copy_from((peers_.rank() + step) % peers_.size());
    } else if (count == 0) {
      return;
    } else if (move_ == Move::reduce) {
      peers_.reduce_sources(out_.data(), dtype_, reduction_, first, count);
    } else if (peers_.one_out()) {
      peers_.reduce_sources(out_.data() + first * width_, dtype_, reduction_, first, count);
    } else {
      peers_.reduce_into_all(dtype_, reduction_, first, count);
    }
  }

  void copy_from(int rank) const {
    const auto& [first, count] = takes_[std::size_t(rank)];
    peers_.copy_from_source(rank, first * width_, out_.data() + places_[std::size_t(rank)] * width_, count * width_);
  }

  Peers& peers_;
  CallLog& log_;
  nb::object facts_;
  Known source_, out_;
  Location source_place_;  // where it lies; or, if it is staged first, where this rank's slab begins
  Location out_place_;
  std::uint64_t slab_nbytes_;  // of half a slab; 0 if the source is not staged
  std::uint64_t version_;      // of the windows in which the places were found
  Move move_;
  std::vector<Range> takes_;            // (first, count) of each rank's source, in elements
  std::vector<std::uint64_t> places_;   // where each goes in out, in elements
  bool alike_;
  std::size_t width_;
  Dtype dtype_;
  Reduction reduction_;
  alignas(8) char header_[kHeaderBytes];
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
