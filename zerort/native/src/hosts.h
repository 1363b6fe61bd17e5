// HostsShortcut: a small collective between hosts, made in one step, on the thread that calls it. Of a larger one it does the same,
// but moves nothing: then all have agreed on it, and Python goes on. Of a gather that is planned the first sends leave meanwhile.
//
//   every rank    meet the ranks of this host ─────────────────────────────────────────────> part from them ──> copy the result
//   its leader      └─> sum, or collect, their sources ── Greeting ──> sum over hosts, or place their shards ──┘
//
// A sum that is cut by host (zerort/comm/transports/small_calls.py) takes a second greeting if every host needs all of it.
// What it does not finish (a rank that does not come soon, calls that differ, a place that others have not heard of) it leaves to
// zerort/comm/transports/hierarchical.py, which decides in the same way: ranks of one call may take either path.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "reduce.h"
#include "rounds.h"
#include "shortcut.h"
#include "wire.h"

namespace zerort {

// How far a call between hosts came, besides kMeeting and kParting.
constexpr int kGreeting = 24, kListening = 32, kConcluding = 40;

// Flags of a greeting; as in zerort/comm/transports/greeting.py.
constexpr std::uint64_t kDiffers = 1, kNewPlace = 2, kFlags = 3;
constexpr int kFlagBits = 2, kPlaceBits = 22;  // below the number of a call: flags, and the set of places that it is made from

// A rank's part of an array: where it begins among all, and its length; bytes.
struct Piece {
  std::size_t place, nbytes;
};
using Shards = std::vector<std::vector<Piece>>;  // of each host, in order

// What one host tells all others about a call: 16 bytes of its digest, its number, places and flags, data. The same messages as
// those of the form in Python, greeting.py.
class Greeting {
 public:
  struct Plan {
    Post post;
    std::vector<int> ranks;  // who greets, one of each host
    std::size_t me;          // this rank among them
    bool direct;             // to all at once; else to those 1, 2, 4, … ahead, with what was heard until then
    char* messages;          // direct: mine, then one of each other; else mine and what comes
    std::size_t stride;      // bytes of each
    std::size_t nbytes, most;  // of the data that this rank sends, and that any does
    char digest[16];
    std::uint64_t places;      // the number of the set that the call is made from
    char* parts;               // rows like those of `messages`, one for each host: what is for it alone
  };
  static constexpr std::size_t kHead = 24;

  explicit Greeting(const Plan& plan) : plan_(plan), under_way_(plan.post) {
    if (plan_.most < plan_.nbytes) plan_.most = plan_.nbytes;
  }

  char* data() const { return plan_.messages + kHead; }
  std::size_t hosts() const { return plan_.ranks.size(); }
  std::uint64_t flags() const { return flags_; }

  // Begin with what this host has to say of the call with this number. If there are `shards`, others' data goes to its place in
  // `whole`, as far as the network can do that; the caller puts its own there.
  void begin(std::uint64_t sequence, std::uint64_t flags, char* whole, const Shards* shards) {
    under_way_.turn_to(sequence);
    number_ = number_of(sequence);
    flags_ = flags;
    heard_ = 1;
    whole_ = whole;
    shards_ = plan_.direct ? shards : nullptr;
    start_round();
  }

  // What a host tells goes to its place, not to its row.
  bool lands(std::size_t host) const {
    return shards_ != nullptr && (host == plan_.me || under_way_.on_sockets(plan_.ranks[host]));
  }

  // The same, directly, with data for each host: `nbytes` of them in `part(host)`.
  void begin_parts(std::uint64_t sequence, std::uint64_t flags, const std::vector<std::size_t>& nbytes) {
    under_way_.turn_to(sequence);
    number_ = number_of(sequence);
    flags_ = flags;
    shards_ = nullptr;
    receive_all(nbytes[plan_.me]);
    for (std::size_t step = 1; step < hosts(); step++) {
      const std::size_t host = (plan_.me + step) % hosts();
      write_head(part(host) - kHead);
      under_way_.send(plan_.ranks[host], Sockets::kGreeting, part(host) - kHead, kHead + nbytes[host]);
    }
  }

  char* part(std::size_t host) const { return plan_.parts + host * plan_.stride + kHead; }
  // What a host had for this one alone.
  const char* part_of(std::size_t host) const { return host == plan_.me ? part(host) : row(host); }

  bool wait(double seconds, double busy) { return under_way_.wait(seconds, busy); }

  // Take what has come; true if that was all, else the next round is under way.
  bool hear() {
    if (plan_.direct) {
      for (std::size_t k = 1; k < hosts(); k++) take_head(plan_.messages + k * plan_.stride);
      return true;
    }
    const char* came = plan_.messages + plan_.stride;
    take_head(came);
    std::memcpy(data() + heard_ * plan_.most, came + kHead, passed() * plan_.most);
    heard_ += passed();
    if (heard_ >= hosts()) return true;
    start_round();
    return false;
  }

  // A host's data, when all was heard.
  const char* row(std::size_t host) const {
    if (!plan_.direct) return data() + (plan_.me + hosts() - host) % hosts() * plan_.most;
    const std::size_t at = host == plan_.me ? 0 : host < plan_.me ? host + 1 : host;
    return plan_.messages + at * plan_.stride + kHead;
  }

 private:
  std::uint64_t number_of(std::uint64_t sequence) const {
    return sequence << (kFlagBits + kPlaceBits) | plan_.places << kFlagBits;
  }

  std::size_t passed() const { return heard_ < hosts() - heard_ ? heard_ : hosts() - heard_; }

  void start_round() {
    write_head(plan_.messages);
    if (!plan_.direct) {
      if (heard_ >= hosts()) return;
      const std::size_t nbytes = kHead + passed() * plan_.most;
      under_way_.receive(plan_.ranks[(plan_.me + hosts() - heard_) % hosts()], Sockets::kGreeting, plan_.messages + plan_.stride,
                         plan_.stride, nbytes);
      under_way_.send(plan_.ranks[(plan_.me + heard_) % hosts()], Sockets::kGreeting, plan_.messages, nbytes);
      return;
    }
    receive_all(plan_.nbytes);
    for (std::size_t step = 1; step < hosts(); step++)  // each begins with another: no host hears all at once
      under_way_.send(plan_.ranks[(plan_.me + step) % hosts()], Sockets::kGreeting, plan_.messages, kHead + plan_.nbytes);
  }

  void write_head(char* message) const {
    const std::uint64_t number = number_ | flags_;
    std::memcpy(message, plan_.digest, sizeof plan_.digest);
    std::memcpy(message + sizeof plan_.digest, &number, sizeof number);
  }

  // Receive, in the order in which they come, messages of about so many bytes of data.
  void receive_all(std::size_t nbytes) {
    for (std::size_t step = 1; step < hosts(); step++) {
      const std::size_t host = (plan_.me + hosts() - step) % hosts();
      char* message = const_cast<char*>(row(host)) - kHead;
      if (!under_way_.on_sockets(plan_.ranks[host])) {
        under_way_.receive(plan_.ranks[host], Sockets::kGreeting, message, plan_.stride, plan_.stride);
        continue;
      }
      std::vector<Sockets::Room> rooms = {{message, kHead}};
      std::size_t likely = nbytes;
      if (shards_ != nullptr) {
        likely = 0;
        for (const Piece& piece : (*shards_)[host]) {
          rooms.push_back({whole_ + piece.place, piece.nbytes});
          likely += piece.nbytes;
        }
      }
      rooms.push_back({message + kHead, plan_.stride - kHead});  // for what a call that differs may say
      under_way_.receive(plan_.ranks[host], Sockets::kGreeting, std::move(rooms), kHead + likely);
    }
  }

  void take_head(const char* message) {
    std::uint64_t number;
    std::memcpy(&number, message + sizeof plan_.digest, sizeof number);
    const std::uint64_t other = (number & ~kFlags) ^ number_;
    const bool same = std::memcmp(message, plan_.digest, sizeof plan_.digest) == 0 && other >> (kFlagBits + kPlaceBits) == 0;
    flags_ |= (number & kFlags) | (same ? 0 : kDiffers) | (other == 0 ? 0 : kNewPlace);
  }

  Plan plan_;
  Messages under_way_;
  std::uint64_t number_ = 0, flags_ = 0;
  std::size_t heard_ = 0;  // hosts whose data is here
  char* whole_ = nullptr;  // where others' data goes
  const Shards* shards_ = nullptr;
};

// What a call between hosts moves: nothing, copies, or sums.
struct HostsRoute : RouteBase {
  std::size_t whole_nbytes, first;  // of the result of all; where this rank's begins in it
  char* notes;                      // in the host's window: flags in its first line, then the result
  std::uint64_t places;             // the number of the set that the call is made from
  double patience;                  // seconds; whoever must wait longer for a host's ranks, or messages, goes on from Python
  double busy;                      // seconds for which the leader polls for messages
  std::shared_ptr<Ahead> ahead;     // what leaves before all have agreed on the call; or none
  // Of the leader only.
  std::vector<std::vector<char>> tails;  // what headers of this host's ranks end with, as all hosts know
  Shards shards;                         // what each host gives to a copy, or sums of a sum that is cut by host
  bool scattered = false;                // of a sum that is cut: no host needs more than what it sums
  std::size_t host = 0;
};

template <typename Away>
class HostsShortcut : public ShortcutBase<HostsRoute> {
 public:
  HostsShortcut(Peers& peers, HostsRoute route, const char* tail, std::optional<Greeting::Plan> plan, Bytes source, Bytes out)
      : ShortcutBase(peers, std::move(route), tail, source, out) {
    if (plan) greeting_.emplace(*plan);
  }

  // When the leader has to look for alarms, on the clock of now_ns().
  std::uint64_t listen_at = 0;

  int run(std::uint64_t sequence) {
    const Away away(kLong);  // what crosses the wire takes longer than a hand-over of the GIL
    show(sequence);
    const Status met = come<StillAway>(true, route_.patience);
    if (met != Status::met) return kMeeting + int(met);
    if (greeting_) greet(sequence);
    if (route_.ahead && route_.ahead->is_from(source_.data)) route_.ahead->send(sequence);  // behind the greeting
    if (greeting_) {
      do {
        if (!greeting_->wait(route_.patience, route_.busy)) return kGreeting;
      } while (!hear());
      if (now_ns() >= listen_at) return kListening;
    }
    const Status parted = come<StillAway>(false, route_.patience);
    if (parted != Status::met) return kParting + int(parted);
    if (flags() != route_.places << kFlagBits) return kConcluding;
    deliver();
    return kDone;
  }

  // The rest, for who goes on after kGreeting …
  bool wait(double seconds, double busy) {
    const Away away(kLong);
    return greeting_->wait(seconds, busy);
  }
  // Take what has come; true if that was all, and the result is there.
  bool hear() {
    if (!greeting_->hear()) return false;
    if (is_cut() && !has_sums_ && !route_.scattered && !(greeting_->flags() & kDiffers)) {
      has_sums_ = true;
      sum_part(greeting_->data(), 0, shard_nbytes(route_.host));
      begin(sequence(), greeting_->flags());
      return false;
    }
    settle();
    return true;
  }
  // … and for all, when the host's ranks have parted: what the leaders said, above it the set of places.
  std::uint64_t flags() const {
    std::uint64_t found;
    std::memcpy(&found, route_.notes, sizeof found);
    return found;
  }
  // Copy the result, if all agreed.
  void deliver() const {
    if (route_.move == Move::nothing || out_.nbytes == 0 || in_place()) return;
    std::memcpy(out_.data, whole() + route_.first, out_.nbytes);
  }

 private:
  struct StillAway {  // `run` is, from its first line on
    explicit StillAway(std::size_t) {}
  };

  // The host holds the result once: the leader writes it, and nobody copies.
  bool in_place() const { return route_.alike && peers_.one_out(); }

  char* whole() const { return in_place() ? out_.data : route_.notes + kCacheLine; }

  // Sum or collect what this host's ranks give, and tell the other hosts.
  void greet(std::uint64_t sequence) {
    std::uint64_t flags = 0;
    for (std::size_t r = 0; r < route_.tails.size(); r++)
      if (std::memcmp(peers_.call(int(r)).header + sizeof sequence, route_.tails[r].data(), route_.tails[r].size()) != 0)
        flags = kNewPlace;
    has_sums_ = false;
    if (is_cut()) {
      std::vector<std::size_t> nbytes;
      for (std::size_t host = 0; host < greeting_->hosts(); host++) {
        char* to = greeting_->part(host);
        for (const Piece& piece : route_.shards[host]) {
          if (piece.nbytes != 0)
            peers_.reduce_sources(to, route_.dtype, route_.reduction, piece.place / route_.width, piece.nbytes / route_.width);
          to += piece.nbytes;
        }
        nbytes.push_back(shard_nbytes(host));
      }
      greeting_->begin_parts(sequence, flags, nbytes);
      return;
    }
    if (route_.move == Move::reduce && route_.whole_nbytes != 0) {
      peers_.reduce_sources(greeting_->data(), route_.dtype, route_.reduction, 0, route_.whole_nbytes / route_.width);
    } else if (route_.move == Move::copy) {
      char* to = greeting_->data();
      int local = 0;
      for (const Piece& piece : route_.shards[route_.host]) {
        if (piece.nbytes != 0) peers_.copy_from_source(local, 0, to, piece.nbytes);
        to += piece.nbytes;
        local++;
      }
    }
    begin(sequence, flags);
  }

  // Tell the other hosts. What they tell goes straight to its place in the window; not in an array of the caller's, which a call
  // that differs must leave as it was.
  void begin(std::uint64_t sequence, std::uint64_t flags) {
    const bool is_placed = !route_.shards.empty() && !in_place();
    greeting_->begin(sequence, flags, whole(), is_placed ? &route_.shards : nullptr);
    if (greeting_->lands(route_.host)) place(route_.host);
  }

  // Copy a host's data to its places in the result.
  void place(std::size_t host) {
    const char* from = greeting_->row(host);
    for (const Piece& piece : route_.shards[host]) {
      if (piece.nbytes != 0) std::memcpy(whole() + piece.place, from, piece.nbytes);
      from += piece.nbytes;
    }
  }

  bool is_cut() const { return route_.move == Move::reduce && !route_.shards.empty(); }

  std::size_t shard_nbytes(std::size_t host) const {
    std::size_t total = 0;
    for (const Piece& piece : route_.shards[host]) total += piece.nbytes;
    return total;
  }

  // Sum over hosts what they had for this one alone, from a byte on.
  void sum_part(char* out, std::size_t first, std::size_t nbytes) const {
    if (nbytes == 0) return;
    std::vector<const void*> rows;
    for (std::size_t host = 0; host < greeting_->hosts(); host++) rows.push_back(greeting_->part_of(host) + first);
    reduce(route_.dtype, route_.reduction, out, rows.data(), rows.size(), nbytes / route_.width);
  }

  // Leave the flags for the ranks of this host, and the result if all agreed.
  void settle() {
    const std::uint64_t flags = greeting_->flags();
    if (!(flags & kDiffers)) {
      char* result = whole();
      if (is_cut() && route_.scattered) {
        std::size_t first = 0;
        for (const Piece& piece : route_.shards[route_.host]) {
          sum_part(result + piece.place, first, piece.nbytes);
          first += piece.nbytes;
        }
      } else if (route_.move == Move::reduce && !is_cut() && route_.whole_nbytes != 0) {
        std::vector<const void*> rows;
        for (std::size_t host = 0; host < greeting_->hosts(); host++) rows.push_back(greeting_->row(host));
        reduce(route_.dtype, route_.reduction, result, rows.data(), rows.size(), route_.whole_nbytes / route_.width);
      } else if (!route_.shards.empty()) {  // each host's part, or its shards, to their places
        for (std::size_t host = 0; host < greeting_->hosts(); host++)
          if (!greeting_->lands(host)) place(host);
      }
    }
    const std::uint64_t told = flags | route_.places << kFlagBits;
    std::memcpy(route_.notes, &told, sizeof told);
  }

  std::optional<Greeting> greeting_;  // of the leader
  bool has_sums_ = false;             // of a sum that is cut: this host's part was summed, and is on its way
};

}  // namespace zerort
