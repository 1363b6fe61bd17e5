// Vector clocks: who has seen what. A lane is a stream or the host; a moment is a lane and a count on it.
//
// CUDA fixes every order when work is submitted (stream order, event waits, the legacy default stream, host waits), so the
// clocks are joined at submission and never depend on how fast this run's workers happened to be.
//
// All host threads share lane 0: the interpreter lock and whatever threads hand work over with already order them, and an
// order that cannot be seen here would be reported as a race that is none.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

namespace cusim {

constexpr int kHostLane = 0;

struct Moment {
  int lane = kHostLane;
  uint64_t count = 0;
};

class Clock {
 public:
  bool saw(const Moment &moment) const {
    return (size_t)moment.lane < counts_.size() && counts_[moment.lane] >= moment.count;
  }
  void join(const Clock &other) {
    if (other.counts_.size() > counts_.size()) counts_.resize(other.counts_.size());
    for (size_t i = 0; i < other.counts_.size(); i++)
      if (other.counts_[i] > counts_[i]) counts_[i] = other.counts_[i];
  }
  Moment tick(int lane) {
    if ((size_t)lane >= counts_.size()) counts_.resize(lane + 1);
    return {lane, ++counts_[lane]};
  }

 private:
  std::vector<uint64_t> counts_;
};

// One lock for every submission and every join: an operation gets its place in its stream and its clock together.
std::mutex &order();

// What the host has seen: everything it has waited for. Hold `order()` while using it.
Clock &host_clock();

}  // namespace cusim
