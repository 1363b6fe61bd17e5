// Meeting: one rank's side of the place drawn in rendezvous.h: say what it came for, arrive, wait for the others, compare.
//
// Waiting is a short spin, a few yields, then a futex. With a core per rank the spin answers in under a microsecond; with more
// ranks than cores a spinning rank would keep the one it waits for off the core, so the spin is short and the futex soon. Where
// the scheduler has put a rank onto the core of one that it waits for, however many cores there are, there is no spin at all, but
// more yields, as long as most of them are soon back (yields.h; decisions 0203, 0205).
// Touches no Python: wait without the GIL.
#pragma once

#include "rendezvous.h"
#include "yields.h"

namespace zerort {

// On the clock of Python's time.perf_counter_ns.
std::uint64_t now_ns();

class Meeting {
 public:
  // `yields`: to ranks on the same core, before it sleeps.
  Meeting(std::uintptr_t control, int rank, int size, int spins, int yields);

  // Say what this rank comes for, where all can read it. `header` has kHeaderBytes.
  void show(const void* header, const Location& source, const Location& out);

  // Come to a meeting for which this rank has shown its call: it ends with a comparison of the calls. Or, not `comparing`,
  // say that it has done reading what the others showed.
  void arrive(bool comparing);

  // Look for the others for as long as a hand-over of the GIL takes; true if all are here.
  bool glance() const;

  // Wait up to `seconds` for the others.
  Status wait(double seconds);

  // What an arrival has led to, once all are here.
  Status compare();

  // Tell every rank, waiting or late, that nobody will meet here again: neither at the meeting that this rank waits for nor, if
  // it has met there, at the next one. Who still sleeps through a meeting that did take place finds it so. Any thread may say
  // so, also while another one waits here.
  void give_up();

  // This rank takes part no longer. Whoever waits for it now is woken to find out. Any thread may say so.
  void leave();

  int rank() const { return rank_; }
  int size() const { return size_; }
  int pid_of(int rank) const { return int(slots_[rank].pid); }
  // What rank came to the current meeting for.
  const Call& call(int rank) const { return slots_[rank].calls[turn_]; }

 private:
  bool everyone_is_here() const { return control_->epoch.load(std::memory_order_acquire) == target(); }
  bool awaits_its_own_core() const;  // a rank that has not come was last seen on the core on which this one runs
  bool someone_left() const;
  bool yield(int times);
  bool is_broken() const;  // the meeting that this rank waits for will not take place
  void wake() const;

  Control* control_;
  Slot* slots_;
  int rank_, size_, spins_, most_yields_;
  std::uint32_t target() const { return target_.load(std::memory_order_relaxed); }

  // Written by the thread that meets, read by one that gives up.
  std::atomic<std::uint32_t> target_{0};  // the epoch that this rank waits for
  std::atomic<std::uint32_t> met_{0};     // the last epoch at which it met all others
  std::uint32_t turn_ = 0;    // which of the two calls in a slot belongs to the current meeting
  bool comparing_ = false;
  Yields yields_;
};

}  // namespace zerort
