// Collectives over shared memory: prepared calls over windows, single steps over memory of the ranks' own.
#include <algorithm>
#include <cstring>

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "harness.h"
#include "memory.h"
#include "peers.h"
#include "shortcut.h"

// In place of libc's: reads a part of what was asked for, as the kernel may, and under ThreadSanitizer in its sight.
extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long, const iovec* remote, unsigned long,
                                    unsigned long) {
  EXPECT(pid == getpid() && local->iov_len == remote->iov_len);
  thread_local harness::Random random(local->iov_len);
  iovec to = *local, from = *remote;
  if (random.below(2) == 0) to.iov_len = from.iov_len = 1 + random.below(to.iov_len);
#if defined(__SANITIZE_THREAD__)
  std::memcpy(to.iov_base, from.iov_base, to.iov_len);
  return ssize_t(to.iov_len);
#else
  return syscall(SYS_process_vm_readv, pid, &to, 1, &from, 1, 0);
#endif
}

namespace harness {
namespace {

using zerort::Bytes;
using zerort::Dtype;
using zerort::kPrivate;
using zerort::kStaging;
using zerort::Location;
using zerort::Move;
using zerort::Peers;
using zerort::Range;
using zerort::Reduction;
using zerort::Status;

enum Window : std::int64_t { staging = kStaging, sources, outs, one };

constexpr std::size_t kGuard = 64;  // bytes after a large result: no sanitizer sees the stores that go past the caches
constexpr std::size_t kLarge = zerort::stream_from / 8 + 5;

// Small whole numbers, which every dtype holds exactly, as do their sums.
int value_of(int rank, std::size_t index, std::uint64_t round) { return int((unsigned(rank) * 3 + index + round) % 5) + 1; }

void put(char* at, Dtype dtype, int value) {
  const auto store = [at](auto number) { std::memcpy(at, &number, sizeof number); };
  if (dtype == Dtype::float32) return store(float(value));
  if (dtype == Dtype::float64) return store(double(value));
  if (dtype == Dtype::int64) return store(std::int64_t(value));
  if (dtype == Dtype::uint8) return store(std::uint8_t(value));
  const float wide = float(value);
  std::uint32_t bits;
  std::memcpy(&bits, &wide, sizeof bits);
  store(std::uint16_t(bits >> 16));  // bfloat16
}

bool holds(const char* at, Dtype dtype, int value) {
  char expected[8];
  put(expected, dtype, value);
  return std::memcmp(at, expected, zerort::itemsize(dtype)) == 0;
}

int reduced(int size, std::size_t index, std::uint64_t round, Reduction reduction) {
  int result = value_of(0, index, round);
  for (int rank = 1; rank < size; rank++) {
    const int value = value_of(rank, index, round);
    result = reduction == Reduction::sum ? result + value : reduction == Reduction::max ? std::max(result, value)
                                                                                       : std::min(result, value);
  }
  return result;
}

// What lives while a rank waits or moves much: a moment in which others run.
struct Away {
  explicit Away(std::size_t) { sched_yield(); }
};

// One group: the place, its windows, and what its ranks agree on in each round.
struct Group {
  const Trial& trial;
  std::size_t capacity;  // bytes of one rank's part of a window
  Place place{trial.size};
  Mapping slabs, given, results, shared;
  std::atomic<int> opened{0};

  Group(const Trial& trial, std::size_t capacity)
      : trial(trial), capacity(capacity), slabs(2 * capacity * std::size_t(trial.size)),
        given(capacity * std::size_t(trial.size)), results(capacity * std::size_t(trial.size)), shared(capacity) {}

  template <typename Body>
  void run(Body body) {
    on_ranks(trial.size, [&](int rank) {
      Random random(mix(trial.seed + 5) + unsigned(rank));
      const int spins[] = {0, 200, 2000};
      Peers peers(place.address(), rank, trial.size, spins[random.below(3)], int(random.below(5)));
      peers.map_window(staging, slabs.address());
      peers.map_window(sources, given.address());
      peers.map_window(outs, results.address());
      peers.map_window(one, shared.address());
      opened.fetch_add(1);
      while (opened.load() < trial.size) sched_yield();
      body(peers, random);
      peers.leave();
    });
  }

  std::uint64_t offset(int rank) const { return capacity * std::size_t(rank); }
};

void wait_until_met(Peers& peers, Status status) {
  while (status == Status::waiting) status = peers.wait(1e-2);
  EXPECT(status == Status::met);
}

void finish(Peers& peers, zerort::Shortcut<Away>& shortcut, int progress) {
  if (progress >= zerort::kMeeting && progress < zerort::kParting) {
    wait_until_met(peers, Status(progress - zerort::kMeeting));
    progress = shortcut.move();
  }
  if (progress >= zerort::kParting) wait_until_met(peers, Status(progress - zerort::kParting));
  else EXPECT(progress == zerort::kDone);
}

// One round of prepared calls: what all ranks draw alike from the round's number.
struct Round {
  int size;
  std::uint64_t number;
  Move move;
  bool staged, alike, in_one, in_place, large, whole;
  Dtype dtype;
  Reduction reduction;
  std::size_t width, count;  // elements of a rank's part

  Round(const Trial& trial, std::uint64_t number, bool large) : size(trial.size), number(number), large(large) {
    Random random(mix(trial.seed) ^ mix(number));
    const Dtype dtypes[] = {Dtype::float64, Dtype::float32, Dtype::bfloat16, Dtype::int64, Dtype::uint8};
    move = Move(random.below(4));
    if (large && move == Move::nothing) move = Move::reduce;
    alike = move == Move::copy && random.below(2) == 0;
    in_one = (alike || move == Move::all_reduce) && random.below(3) == 0;
    in_place = move == Move::all_reduce && !in_one && random.below(2) == 0;
    staged = !in_place && random.below(2) == 0;
    dtype = dtypes[large ? 0 : random.below(5)];
    reduction = Reduction(random.below(3));
    width = zerort::itemsize(dtype);
    count = large ? kLarge : random.below(60);
    if (move == Move::all_reduce && large) count = kLarge / 2;
    whole = move == Move::all_reduce && staged && !in_one && random.below(2) == 0;
  }

  // Elements of a source and of an out.
  std::size_t given() const { return alike || move == Move::nothing ? count : count * std::size_t(size); }
  std::size_t made() const { return move == Move::reduce ? count : move == Move::nothing ? 0 : count * std::size_t(size); }

  int expected(int rank, std::size_t index) const {
    const std::size_t from = index / (count == 0 ? 1 : count), within = index % (count == 0 ? 1 : count);
    if (move == Move::reduce) return reduced(size, std::size_t(rank) * count + index, number, reduction);
    if (move == Move::all_reduce) return reduced(size, index, number, reduction);
    return value_of(int(from), alike ? within : std::size_t(rank) * count + within, number);
  }
};

void make_call(Group& group, Peers& peers, Random& random, const Round& round) {
  const int rank = peers.rank();
  const std::uint64_t own = group.offset(rank);
  std::vector<char> private_source(round.staged ? round.given() * round.width : 0);
  std::vector<char> private_out(round.made() * round.width + (round.large ? kGuard : 0), char(0xa5));
  char* source = round.staged ? private_source.data() : group.given.data() + own;
  for (std::size_t k = 0; k < round.given(); k++) put(source + k * round.width, round.dtype, value_of(rank, k, round.number));
  const bool anywhere = round.whole || (round.move != Move::all_reduce && !round.in_one && random.below(2) == 0);
  Location out_place = {outs, own};
  char* out = group.results.data() + own;
  if (round.in_one) out = group.shared.data(), out_place = {one, 0};
  if (round.in_place) out = source, out_place = {sources, own};
  if (anywhere) out = private_out.data(), out_place = {kPrivate, reinterpret_cast<std::uint64_t>(out)};
  zerort::Route route = {{round.staged ? Location{staging, 2 * own} : Location{sources, own}, out_place,
                          round.staged ? group.capacity : 0, round.move, round.alike, round.width, round.dtype, round.reduction},
                         {},
                         {},
                         round.whole ? round.made() * round.width : 0};
  for (int r = 0; r < round.size; r++) {
    const bool mine = round.move == Move::copy && !round.alike;
    route.takes.push_back({round.alike ? 0 : std::uint64_t(mine ? rank : r) * round.count, round.count});
    route.places.push_back(std::uint64_t(r) * round.count);
  }
  char tail[zerort::kHeaderBytes - 8] = {};
  zerort::Shortcut<Away> shortcut(peers, route, tail, Bytes{source, round.given() * round.width},
                                  Bytes{out, round.made() * round.width});
  EXPECT(!shortcut.is_stale());
  stumble(random);
  finish(peers, shortcut, shortcut.run(round.number));
  stumble(random);
  for (std::size_t k = 0; k < round.made(); k++)
    EXPECT(holds(out + k * round.width, round.dtype, round.expected(rank, k)));
  for (std::size_t k = round.made() * round.width; k < private_out.size(); k++) EXPECT(private_out[k] == char(0xa5));
}

// Meet with sources where they lie, in private memory for some ranks, and read and reduce them in single steps.
void read_sources(Group& group, Peers& peers, Random& random, std::uint64_t round) {
  Random alike(mix(group.trial.seed + 9) ^ mix(round));
  const int rank = peers.rank(), size = peers.size();
  const std::size_t numel = round == 0 ? 70001 : 1 + alike.below(200);  // the first is longer than a block
  const std::uint64_t privately = alike.below(1u << size);
  const auto reduction = Reduction(alike.below(3));
  const std::uint64_t own = group.offset(rank);
  std::vector<float> mine(numel);
  const bool is_private = ((privately >> rank) & 1) != 0;
  char* source = is_private ? reinterpret_cast<char*>(mine.data()) : group.given.data() + own;
  for (std::size_t k = 0; k < numel; k++) put(source + 4 * k, Dtype::float32, value_of(rank, k, round));
  char header[zerort::kHeaderBytes] = {};
  std::memcpy(header, &round, sizeof round);
  const auto address = reinterpret_cast<std::uint64_t>(source);
  stumble(random);
  peers.show(header, is_private ? Location{kPrivate, address} : Location{sources, own}, {outs, own});
  peers.arrive(true);
  wait_until_met(peers, peers.wait(1e-3));
  EXPECT(peers.sources_in_windows() == (privately == 0) && peers.outs_in_windows());
  const std::size_t first = random.below(numel), many = 1 + random.below(numel - first);
  std::vector<char> result(many * 4), copy(many * 4);
  peers.reduce_sources(result.data(), Dtype::float32, reduction, first, many);
  for (std::size_t k = 0; k < many; k++)
    EXPECT(holds(result.data() + 4 * k, Dtype::float32, reduced(size, first + k, round, reduction)));
  const int other = int(random.below(std::uint64_t(size)));
  peers.copy_from_source(other, first * 4, copy.data(), many * 4);
  for (std::size_t k = 0; k < many; k++)
    EXPECT(holds(copy.data() + 4 * k, Dtype::float32, value_of(other, first + k, round)));
  // Every rank reduces its part into all outs; all of it is there once they have parted.
  const std::size_t from = numel * std::size_t(rank) / std::size_t(size), to = numel * std::size_t(rank + 1) / std::size_t(size);
  peers.reduce_into_all(Dtype::float32, reduction, from, to - from);
  peers.arrive(false);
  wait_until_met(peers, peers.wait(1e-3));
  peers.copy_from_out(other, first * 4, copy.data(), many * 4);
  EXPECT(copy == result);
  peers.arrive(false);
  wait_until_met(peers, peers.wait(1e-3));
}

}  // namespace

void call_prepared(const Trial& trial, Figures& figures) {
  {
    Group group(trial, 64 * std::size_t(trial.size) * 8);
    group.run([&](Peers& peers, Random& random) {
      for (int round = 0; round < trial.rounds; round++) make_call(group, peers, random, Round(trial, std::uint64_t(round), false));
      zerort::Shortcut<Away> barrier(peers, {}, std::vector<char>(zerort::kHeaderBytes).data(), {}, {});
      peers.unmap_window(outs);
      EXPECT(barrier.is_stale());
    });
    figures["prepared"] += std::uint64_t(trial.rounds);
  }
  if (trial.size > 3) return;  // more ranks than these only move more
  Group group(trial, kLarge * std::size_t(trial.size) * 8);
  group.run([&](Peers& peers, Random& random) {
    make_call(group, peers, random, Round(trial, trial.seed * 2, true));
  });
  figures["prepared_large"] += 1;
}

void read_peers(const Trial& trial, Figures& figures) {
  const int rounds = trial.rounds / 4 + 1;
  Group group(trial, 70001 * 4 + 4);
  group.run([&](Peers& peers, Random& random) {
    for (int round = 0; round < rounds; round++) read_sources(group, peers, random, std::uint64_t(round));
  });
  figures["read"] += std::uint64_t(rounds);
}

}  // namespace harness
