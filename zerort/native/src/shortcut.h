// Shortcut: meet, compare, move, part: a collective whose arguments were found good, made in one step.
//
// Only what needs no more than the others' windows is done here. For anything else (a rank that does not come soon, calls
// that differ, arrays in private memory) it returns how far it came, and zerort/comm/transports/node/transport.py goes on from there. What is
// decided here is decided there in the same way: ranks of one meeting may take either path.
// Touches no Python: `Away` is what lives while this rank waits or moves much, so that other threads may run. It is made from
// the number of bytes to be moved, kLong for a wait.
#pragma once

#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "peers.h"

namespace zerort {

constexpr std::int64_t kStaging = 0;  // the window of the slabs
constexpr double kPatience = 2e-3;    // seconds; whoever must wait longer looks around from Python meanwhile
constexpr std::size_t kLong = std::numeric_limits<std::size_t>::max();

// How far a call came; with a Status added, unless it is done or was not begun.
constexpr int kDone = 0, kStale = 1, kMeeting = 8, kParting = 16;

enum class Move { nothing, copy, reduce, all_reduce };

using Range = std::pair<std::uint64_t, std::uint64_t>;

// What a call does, and where its arrays lie.
struct RouteBase {
  Location source;  // where it lies; or, if it is staged first, where this rank's slab begins
  Location out;
  std::uint64_t slab_nbytes;  // of half a slab; 0 if the source is not staged
  Move move;
  bool alike;         // every rank ends with the same out
  std::size_t width;  // bytes of an element
  Dtype dtype;
  Reduction reduction;
};

// What a call within a host moves.
struct Route : RouteBase {
  std::vector<Range> takes;           // (first, count) of each rank's source, in elements
  std::vector<std::uint64_t> places;  // where each goes in out, in elements
  std::uint64_t whole_nbytes = 0;     // staged all-reduces up to this size are summed whole by every rank
};

// A rank's own array.
struct Bytes {
  char* data;
  std::size_t nbytes;
};

// What all shortcuts have: their header, where their arrays lie, and the ranks of this host, which they meet first. `AnyRoute` is
// Route or HostsRoute (hosts.h).
template <typename AnyRoute>
class ShortcutBase {
 public:
  // `tail`: the packed header without its number.
  ShortcutBase(Peers& peers, AnyRoute route, const void* tail, Bytes source, Bytes out)
      : peers_(peers), route_(std::move(route)), source_(source), out_(out), version_(peers.version()) {
    std::memcpy(header_ + sizeof(std::uint64_t), tail, kHeaderBytes - sizeof(std::uint64_t));
  }

  // Windows have come or gone since the places were found.
  bool is_stale() const { return version_ != peers_.version(); }

  // Take a source that lies elsewhere than the one before; it is staged, or nobody reads it.
  void take_source(Bytes source) { source_ = source; }

  // Take an out in private memory, in place of one there.
  void take_out(Bytes out) {
    out_ = out;
    route_.out = {kPrivate, reinterpret_cast<std::uint64_t>(out.data)};
  }

 protected:
  // Let the others see the call with this number, and its arrays.
  void show(std::uint64_t sequence) {
    std::memcpy(header_, &sequence, sizeof sequence);  // little-endian, as zerort/comm/guard/call.py packs it
    peers_.show(header_, route_.slab_nbytes != 0 ? staged() : route_.source, route_.out);
  }

  // The number of the call that was shown last.
  std::uint64_t sequence() const {
    std::uint64_t shown;
    std::memcpy(&shown, header_, sizeof shown);
    return shown;
  }

  // Come to a meeting (`comparing`) or a parting; in `Pause`, which is made from kLong, while others are late.
  template <typename Pause>
  Status come(bool comparing, double patience = kPatience) {
    peers_.arrive(comparing);
    if (peers_.glance()) return peers_.compare();
    const Pause pause(kLong);
    return peers_.wait(patience);
  }

  Peers& peers_;
  AnyRoute route_;
  Bytes source_, out_;

 private:
  // Copy the source into the half of the slab whose turn it is, and say where that is.
  Location staged() {
    peers_.half ^= 1;
    const Location place = {kStaging, route_.source.offset + std::uint64_t(peers_.half) * route_.slab_nbytes};
    if (source_.nbytes != 0) std::memcpy(peers_.mapped(place), source_.data, source_.nbytes);  // else it may be null
    return place;
  }

  const std::uint64_t version_;  // of the windows in which the places were found
  alignas(8) char header_[kHeaderBytes];
};

template <typename Away>
class Shortcut : public ShortcutBase<Route> {
 public:
  using ShortcutBase<Route>::ShortcutBase;

  // Make the call with this number.
  int run(std::uint64_t sequence) {
    show(sequence);
    const Status met = come<Away>(true);
    return met == Status::met ? move() : kMeeting + int(met);
  }

  // What follows when all have met.
  int move() {
    if (route_.move == Move::nothing) return kDone;
    if (!readable()) return kMeeting + int(Status::met);
    const bool whole = route_.move == Move::all_reduce && sums_whole();
    const bool parting = (route_.move == Move::all_reduce && !whole) || (route_.alike && peers_.one_out()) ||
                         !peers_.all_sources_in(kStaging);
    if (whole)
      sum_whole();
    else
      take();
    if (!parting) return kDone;
    const Status parted = come<Away>(false);
    return parted == Status::met ? kDone : kParting + int(parted);
  }

 private:
  bool readable() const {
    return peers_.sources_in_windows() &&
           (route_.move != Move::all_reduce || peers_.outs_in_windows() || sums_whole());
  }

  // All that the ranks read are copies, and little: each sums all of it, and nobody waits for the readers.
  bool sums_whole() const {
    return out_.nbytes <= route_.whole_nbytes && peers_.all_sources_in(kStaging) && !peers_.outs_in_windows();
  }

  void sum_whole() {
    const Away away(out_.nbytes * route_.takes.size());
    peers_.reduce_sources(out_.data, route_.dtype, route_.reduction, 0, out_.nbytes / route_.width);
  }

  void take() {
    const auto& [first, count] = route_.takes[std::size_t(peers_.rank())];
    const Away away(route_.move == Move::copy ? out_.nbytes : count * route_.width * route_.takes.size());
    if (route_.move == Move::copy && route_.alike && peers_.one_out()) {
      copy_from(peers_.rank());  // every rank writes its own part of the one gathered array
    } else if (route_.move == Move::copy) {
      for (int step = 0; step < peers_.size(); step++)  // everybody starts at home: no two queue at one rank's memory
        copy_from((peers_.rank() + step) % peers_.size());
    } else if (count == 0) {
      return;
    } else if (route_.move == Move::reduce) {
      peers_.reduce_sources(out_.data, route_.dtype, route_.reduction, first, count);
    } else if (peers_.one_out()) {
      peers_.reduce_sources(out_.data + first * route_.width, route_.dtype, route_.reduction, first, count);
    } else {
      peers_.reduce_into_all(route_.dtype, route_.reduction, first, count);
    }
  }

  void copy_from(int rank) const {
    const auto& [first, count] = route_.takes[std::size_t(rank)];
    char* to = out_.data + route_.places[std::size_t(rank)] * route_.width;
    peers_.copy_from_source(rank, first * route_.width, to, count * route_.width);
  }
};

}  // namespace zerort
