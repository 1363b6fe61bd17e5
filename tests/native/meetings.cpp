// Meetings: that they take place, that they order memory, and that whoever waits is told when they will not take place.
#include <cstring>
#include <memory>

#include "harness.h"
#include "meeting.h"
#include "yields.h"

namespace harness {
namespace {

using zerort::kHeaderBytes;
using zerort::Meeting;
using zerort::Slot;
using zerort::Status;

// Nobody waits so long unless a wake-up was lost.
constexpr double kForever = 20.0;

struct Header {
  std::uint64_t words[kHeaderBytes / 8];

  // The first half must be equal on all ranks; the second is each rank's own.
  Header(std::uint64_t agreed, int rank) {
    for (std::size_t k = 0; k < kHeaderBytes / 8; k++) words[k] = k < 12 ? mix(agreed + k) : mix(agreed + k) ^ unsigned(rank);
  }
};

Meeting meeting_of(const Place& place, int rank, int size, Random& random) {
  const int spins[] = {0, 1, 50, 1000}, yields[] = {0, 1, 10};
  return Meeting(place.address(), rank, size, spins[random.below(4)], yields[random.below(3)]);
}

// Wait until all are here or nobody will be, in slices of any length; count the slices that were too short.
Status wait_for_all(Meeting& meeting, Random& random, std::uint64_t& slices) {
  if (random.below(3) == 0 && meeting.glance()) return meeting.compare();
  for (;;) {
    const double seconds[] = {0.0, 1e-6, 1e-4, 1e-2};
    const Status status = meeting.wait(seconds[random.below(4)]);
    if (status != Status::waiting) return status;
    slices++;
    stumble(random);
  }
}

// Look at a slot as zerort/native/rendezvous.py does at any time: at its words, each by itself.
void look_at(const Slot& slot) {
  EXPECT(slot.state.load() <= 3);
  slot.arrived.load();
  __atomic_load_n(reinterpret_cast<const std::uint32_t*>(&slot.meets), __ATOMIC_ACQUIRE);
  __atomic_load_n(reinterpret_cast<const std::uint64_t*>(&slot.since_ns), __ATOMIC_RELAXED);
}

// A late rank's last call stands still, so that it may be read.
void read_last_call(const Slot& slot, int rank, std::uint64_t agreed) {
  const std::uint32_t meets = __atomic_load_n(reinterpret_cast<const std::uint32_t*>(&slot.meets), __ATOMIC_ACQUIRE);
  if (meets == 0) return;
  const Header expected(agreed + meets - 1, rank);
  EXPECT(std::memcmp(slot.calls[(meets - 1) % 2].header, expected.words, kHeaderBytes) == 0);
}

enum class Breach { before, after, elsewhere, left, late };

// How a rank keeps the others from meeting, after `rounds` meetings at which all was well.
struct Break {
  const Trial& trial;
  Place place{trial.size};
  std::uint64_t agreed;
  Breach breach;
  int culprit, rounds;
  std::atomic<int> given_up{0};
  std::vector<int> met;

  Break(const Trial& trial, std::uint64_t number)
      : trial(trial), agreed(mix(mix(trial.seed) ^ number)), met(std::size_t(trial.size), 0) {
    Random random(agreed);
    breach = Breach(random.below(5));
    culprit = int(random.below(std::uint64_t(trial.size)));
    rounds = int(random.below(4));
  }

  void run() {
    Mapping gate(sizeof(std::atomic<int>));
    auto& opened = *reinterpret_cast<std::atomic<int>*>(gate.data());
    on_ranks(trial.size, [&](int rank) {
      Random random(agreed ^ mix(std::uint64_t(rank) + 77));
      Meeting meeting = meeting_of(place, rank, trial.size, random);
      opened.fetch_add(1);  // as ranks agree over MPI that all have opened the group
      while (opened.load() < trial.size) sched_yield();
      if (meets_until_broken(meeting, rank, random)) EXPECT(come(meeting, rank, random) != Status::met);
      meeting.leave();
    });
    for (const int count : met) EXPECT(count == rounds || (count == rounds + 1 && breach != Breach::left));
  }

  // The meetings before; false if this rank is the one that breaks the next.
  bool meets_until_broken(Meeting& meeting, int rank, Random& random) {
    std::uint64_t slices = 0;
    for (int round = 0; round < rounds; round++) {
      show(meeting, rank);
      meeting.arrive(true);
      EXPECT(wait_for_all(meeting, random, slices) == Status::met);
      met[std::size_t(rank)]++;
    }
    if (rank != culprit) return true;
    stumble(random);
    switch (breach) {
      case Breach::before:
        meeting.give_up();
        return false;
      case Breach::left:
        return false;
      case Breach::after:
        // It has come, and all others may have met it by the time at which it says so.
        show(meeting, rank);
        meeting.arrive(true);
        stumble(random);
        meeting.give_up();
        return false;
      case Breach::elsewhere: {
        // Another thread of this rank says so, while this one meets.
        std::thread other([&meeting, seed = random.below(1000)] {
          Random random(seed);
          stumble(random);
          meeting.give_up();
        });
        show(meeting, rank);
        meeting.arrive(true);
        const Status status = meeting.wait(kForever);
        if (status == Status::met) met[std::size_t(rank)]++;
        other.join();
        return false;
      }
      case Breach::late:
        while (given_up.load(std::memory_order_relaxed) == 0) stumble(random);
        return true;
    }
    return false;
  }

  // The meeting that one rank breaks.
  Status come(Meeting& meeting, int rank, Random& random) {
    stumble(random);
    show(meeting, rank);
    meeting.arrive(true);
    const bool waits_for_late = breach == Breach::late && rank != culprit;
    const std::uint64_t began = zerort::now_ns();
    Status status = meeting.wait(waits_for_late ? double(random.below(3)) * 1e-4 : kForever);
    if (!waits_for_late) EXPECT(double(zerort::now_ns() - began) < 0.9e9 * kForever);  // it was woken
    if (status == Status::met) {
      // The breaker had come: this meeting took place, the next one will not.
      met[std::size_t(rank)]++;
      meeting.arrive(false);
      status = meeting.wait(kForever);
    }
    if (status == Status::waiting) {
      EXPECT(breach == Breach::left || breach == Breach::late);
      if (breach == Breach::left) EXPECT(place.slot(culprit).state.load() == 2 || place.slot(culprit).state.load() == 3);
      if (breach == Breach::late) read_last_call(place.slot(culprit), culprit, agreed);
      meeting.give_up();
      given_up.store(1, std::memory_order_relaxed);
    }
    return status;
  }

  void show(Meeting& meeting, int rank) {
    const Header header(agreed + unsigned(met[std::size_t(rank)]), rank);
    meeting.show(header.words, {0, 0}, {0, 0});
  }
};

// Yields at made-up times, which never go back.
struct FakeTime {
  zerort::Yields yields;
  std::uint64_t now = 1'000'000;

  // One in a meeting of its own; returns for how long none is allowed at the next.
  std::uint64_t yield_once(std::uint64_t took, bool met) {
    yields.begin();
    EXPECT(yields.allowed(now));
    yields.note(now, now + took, met);
    now += took;
    yields.begin();
    std::uint64_t least = 0, most = 2 * zerort::Yields::kLongestPauseNs;
    while (least < most) {
      const std::uint64_t middle = (least + most) / 2;
      if (yields.allowed(now + middle))
        most = middle;
      else
        least = middle + 1;
    }
    now += least;
    return least;
  }
};

}  // namespace

void check_account_of_yields(Figures& figures) {
  using zerort::Yields;
  constexpr std::uint64_t soon = Yields::kLateNs, late = soon + 1, most = Yields::kMostSavedNs, pause = Yields::kPause;
  FakeTime time;
  for (int k = 0; k < 1000; k++) EXPECT(time.yield_once(soon, false) == 0);  // in vain, but soon
  EXPECT(time.yield_once(late, false) == 0);                                 // what is there to begin with pays
  EXPECT(time.yield_once(most - late, false) == 0);
  EXPECT(time.yield_once(late, true) == pause * late);   // nothing is left
  EXPECT(time.yield_once(late, false) == pause * late);  // nor is anything saved by one that is late, or by staying away
  for (int k = 0; k < 10; k++) EXPECT(time.yield_once(soon, true) == 0);
  EXPECT(time.yield_once(late, false) == pause * (late - 10 * Yields::kSavedNs));
  for (std::uint64_t k = 0; k < 2 * most / Yields::kSavedNs; k++) time.yield_once(soon, true);  // more than is kept
  EXPECT(time.yield_once(most + late, false) == pause * late);
  EXPECT(time.yield_once(most, false) == Yields::kLongestPauseNs);
  for (int k = 0; k < 1000; k++) time.yield_once(soon, true);
  time.yields.note(time.now, time.now + late, false);  // paid for, but none follows in this meeting
  EXPECT(!time.yields.allowed(time.now + late));
  time.yields.begin();
  EXPECT(time.yields.allowed(time.now + late));
  figures["accounts"] += 1;
}

void meet_often(const Trial& trial, Figures& figures) {
  const Place place(trial.size);
  std::vector<std::uint64_t> cells(std::size_t(trial.size) * 8);  // plain words: only meetings keep them in order
  std::vector<std::uint64_t> slices(std::size_t(trial.size));
  std::atomic<int> running{trial.size}, opened{0};
  std::thread watcher([&] {
    Random random(trial.seed);
    while (running.load(std::memory_order_relaxed) > 0) {
      for (int rank = 0; rank < trial.size; rank++) look_at(place.slot(rank));
      stumble(random);
    }
  });
  on_ranks(trial.size, [&](int rank) {
    Random random(mix(trial.seed) + unsigned(rank));
    Meeting meeting = meeting_of(place, rank, trial.size, random);
    opened.fetch_add(1);
    while (opened.load() < trial.size) sched_yield();
    for (int round = 0; round < trial.rounds; round++) {
      const std::uint64_t agreed = mix(trial.seed ^ (std::uint64_t(round) << 20));
      const bool differs = agreed % 16 == 0;
      const Header header(differs ? agreed + unsigned(rank) : agreed, rank);
      cells[std::size_t(rank) * 8] = agreed;
      stumble(random);
      meeting.show(header.words, {std::int64_t(round), agreed}, {rank, agreed});
      meeting.arrive(true);
      const Status status = wait_for_all(meeting, random, slices[std::size_t(rank)]);
      EXPECT(status == (differs ? Status::disagree : Status::met));
      for (int other = 0; other < trial.size; other++) {
        const zerort::Call& call = meeting.call(other);
        const Header expected(differs ? agreed + unsigned(other) : agreed, other);
        EXPECT(std::memcmp(call.header, expected.words, kHeaderBytes) == 0);
        EXPECT(call.source.window == round && call.source.offset == agreed && call.out.window == other);
        EXPECT(cells[std::size_t(other) * 8] == agreed || trial.fault == Fault::parting);
      }
      stumble(random);
      if (trial.fault == Fault::parting) continue;  // nobody knows that all have read
      meeting.arrive(false);
      EXPECT(wait_for_all(meeting, random, slices[std::size_t(rank)]) == Status::met);
    }
    meeting.leave();
    running.fetch_sub(1, std::memory_order_relaxed);
  });
  watcher.join();
  figures["meetings"] += std::uint64_t(trial.rounds) * 2;
  for (const std::uint64_t count : slices) figures["timeouts"] += count;
}

void break_meetings(const Trial& trial, Figures& figures) {
  const int times = trial.rounds / 8 + 5;
  for (int number = 0; number < times; number++) Break(trial, std::uint64_t(number)).run();
  figures["broken"] += std::uint64_t(times);
}

}  // namespace harness
