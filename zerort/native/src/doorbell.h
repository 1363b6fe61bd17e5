// Doorbell: how a worker thread waits for work that the one that rings may well do itself.
//
// A thread that is woken takes a core from those at work, and a Python thread the GIL as well, only to find that there is
// nothing left to do. So the bell rings late: a timer is set when work comes and stopped when someone takes it, and the
// worker, which sleeps on the timer without the GIL, wakes only for work that nobody has taken by then.
// Touches no Python: wait without the GIL.
#pragma once

#include <cerrno>
#include <cstdint>
#include <mutex>
#include <system_error>

#include <sys/timerfd.h>
#include <unistd.h>

namespace zerort {

class Doorbell {
 public:
  // `grace`: seconds that work is left to others before the worker is woken for it.
  explicit Doorbell(double grace)
      : grace_ns_(grace > 0 ? long(grace * 1e9) : 1), timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)) {
    if (timer_ < 0) throw std::system_error(errno, std::generic_category(), "timerfd_create");
  }
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;
  ~Doorbell() { close(timer_); }

  // There is one piece of work more.
  void ring() {
    const std::lock_guard<std::mutex> hold(lock_);
    if (pending_++ == 0) set(grace_ns_);
  }

  // Someone has taken a piece.
  void answer() {
    const std::lock_guard<std::mutex> hold(lock_);
    set(--pending_ > 0 ? grace_ns_ : 0);  // the next piece has a grace of its own
  }

  // There are so many pieces; said while none comes or is taken. An interrupt between a piece and its ring miscounts.
  void recount(int pending) {
    const std::lock_guard<std::mutex> hold(lock_);
    pending_ = pending;
    set(pending_ > 0 ? grace_ns_ : 0);
  }

  // Sleep until there is work that nobody has taken within the grace.
  void wait() {
    for (;;) {
      std::uint64_t times;
      if (read(timer_, &times, sizeof times) < 0 && errno != EINTR)
        throw std::system_error(errno, std::generic_category(), "read of a timerfd");
      const std::lock_guard<std::mutex> hold(lock_);
      if (pending_ > 0) return;
    }
  }

 private:
  // Let the timer go off in `ns` nanoseconds; 0 stops it.
  void set(long ns) {
    const itimerspec due = {{0, 0}, {ns / 1000000000, ns % 1000000000}};
    timerfd_settime(timer_, 0, &due, nullptr);
  }

  const long grace_ns_;
  const int timer_;
  std::mutex lock_;
  int pending_ = 0;
};

}  // namespace zerort
