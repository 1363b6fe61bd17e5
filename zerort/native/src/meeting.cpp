#include "meeting.h"

#include <climits>
#include <cstring>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace zerort {
namespace {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free,
              "processes share these words");

// With a core for each rank the others are there by then, or have not called yet.
constexpr int kGlances = 100;

// Of a spin, between two looks at where the others are.
constexpr int kSpinsPerLook = 64;

// Where those that this rank waits for are on other cores.
constexpr int kYields = 4;

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the word lies in memory that several processes have mapped.
long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

std::uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::uint64_t(now.tv_sec) * 1000000000u + std::uint64_t(now.tv_nsec);
}

Meeting::Meeting(std::uintptr_t control, int rank, int size, int spins, int yields)
    : control_(reinterpret_cast<Control*>(control)),
      slots_(reinterpret_cast<Slot*>(control + sizeof(Control))),
      rank_(rank), size_(size), spins_(spins), most_yields_(yields) {
  Slot& mine = slots_[rank_];
  mine.pid = std::uint32_t(getpid());
  const std::uint32_t epoch = control_->epoch.load();
  target_ = epoch;
  met_ = epoch;
  mine.arrived.store(epoch);
  mine.since_ns = now_ns();
  mine.state.store(1);
}

void Meeting::show(const void* header, const Location& source, const Location& out) {
  Slot& mine = slots_[rank_];
  const std::uint32_t meets = mine.meets.load(std::memory_order_relaxed);
  turn_ = meets % 2;
  Call& call = mine.calls[turn_];
  std::memcpy(call.header, header, kHeaderBytes);
  call.source = source;
  call.out = out;
  mine.meets.store(meets + 1, std::memory_order_release);
}

void Meeting::arrive(bool comparing) {
  comparing_ = comparing;
  yields_.begin();
  // Only ranks that have seen the current epoch arrive, so it cannot move before all of them have.
  const std::uint32_t epoch = control_->epoch.load(std::memory_order_acquire);
  Slot& mine = slots_[rank_];
  mine.since_ns.store(now_ns(), std::memory_order_relaxed);
  mine.core.store(std::uint32_t(sched_getcpu() + 1), std::memory_order_relaxed);  // 0 where it cannot be told
  mine.arrived.store(epoch + 1, std::memory_order_release);
  target_.store(epoch + 1, std::memory_order_relaxed);
  if (control_->count.fetch_add(1, std::memory_order_acq_rel) + 1 == std::uint32_t(size_)) {
    control_->count.store(0, std::memory_order_relaxed);
    control_->epoch.store(epoch + 1, std::memory_order_seq_cst);
    if (control_->sleepers.load(std::memory_order_seq_cst)) wake();
  }
}

bool Meeting::awaits_its_own_core() const {
  const std::uint32_t here = slots_[rank_].core.load(std::memory_order_relaxed);
  if (here == 0) return false;
  for (int r = 0; r < size_; r++)
    if (slots_[r].core.load(std::memory_order_relaxed) == here && slots_[r].arrived.load(std::memory_order_relaxed) != target())
      return true;
  return false;
}

bool Meeting::glance() const {
  if (awaits_its_own_core()) return everyone_is_here();
  for (int k = 0; k < kGlances && k < spins_; k++) {
    if (everyone_is_here()) return true;
    pause_core();
  }
  return everyone_is_here();
}

// Let whoever shares this core run, a few times; true if all are here then.
bool Meeting::yield(int times) {
  std::uint64_t now = now_ns();
  for (int k = 0; k < times && yields_.allowed(now); k++) {
    const std::uint64_t began = now;
    sched_yield();
    const bool met = everyone_is_here();
    now = now_ns();
    yields_.note(began, now, met);
    if (met) return true;
  }
  return false;
}

Status Meeting::wait(double seconds) {
  bool alone = true;
  for (int k = 0; alone && k < spins_; k++) {
    if (everyone_is_here()) return compare();
    pause_core();
    if (k % kSpinsPerLook == 0) alone = !awaits_its_own_core();
  }
  if (yield(alone ? kYields : most_yields_)) return compare();
  const std::uint64_t deadline = now_ns() + std::uint64_t(seconds * 1e9);
  while (!everyone_is_here()) {
    if (is_broken()) return Status::broken;
    const std::uint64_t now = now_ns();
    if (now >= deadline) return Status::waiting;
    const timespec left = {time_t((deadline - now) / 1000000000u), long((deadline - now) % 1000000000u)};
    // First say that there is a sleeper, then look at the bell, then at what it rings for: who completes, breaks or leaves the
    // meeting before that look is seen by it, and who does so later finds the sleeper and moves the bell.
    control_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t rung = control_->bell.load(std::memory_order_seq_cst);
    if (control_->epoch.load(std::memory_order_seq_cst) != target() && !someone_left())
      futex(&control_->bell, FUTEX_WAIT, rung, &left);
    control_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    // A rank left or gave up: the caller finds out which.
    if (!everyone_is_here() && someone_left()) return is_broken() ? Status::broken : Status::waiting;
  }
  return compare();
}

Status Meeting::compare() {
  // A rank that comes late completes the meeting, but those it meets have given up and gone.
  if (is_broken()) return Status::broken;
  met_.store(target(), std::memory_order_relaxed);
  if (comparing_)
    for (int r = 0; r < size_; r++)
      if (std::memcmp(call(r).header, call(rank_).header, kAgreedBytes) != 0) return Status::disagree;
  return Status::met;
}

bool Meeting::is_broken() const {
  const std::uint64_t word = control_->broken.load(std::memory_order_acquire);
  return word != 0 && std::int32_t(std::uint32_t(word) - target()) <= 0;  // epochs wrap around
}

void Meeting::give_up() {
  const std::uint32_t met = met_.load(), target = target_.load();  // in this order: an epoch is met after it was the target
  const std::uint32_t first = met == target ? target + 1 : target;
  std::uint64_t word = control_->broken.load();
  while (word == 0 || std::int32_t(first - std::uint32_t(word)) < 0)
    if (control_->broken.compare_exchange_weak(word, kBroken | first)) break;
  slots_[rank_].state.store(3);
  wake();
}

void Meeting::leave() {
  std::uint32_t here = 1;  // not if it gave up before
  slots_[rank_].state.compare_exchange_strong(here, 2);
  wake();
}

bool Meeting::someone_left() const {
  for (int r = 0; r < size_; r++)
    if (slots_[r].state.load() == 2 && slots_[r].arrived.load() != target()) return true;
  return is_broken();
}

void Meeting::wake() const {
  control_->bell.fetch_add(1, std::memory_order_seq_cst);
  futex(&control_->bell, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace zerort
