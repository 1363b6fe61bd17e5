// Yields: whether to let others run on this core, before a rank that waits for one of them sleeps.
//
// Where ranks take turns on a core, a yield saves what it costs to sleep and be woken. Where a program shares the core that does not
// yield in turn, yields make small calls slower: the rank goes behind that program, and a sleeper would be woken sooner. A yield that
// comes back late is a sign of such a program, but one proves little: a rank that starts, or computes between two calls, keeps
// its core as long. So a meeting has one of them at the most, and what it took is paid from an account into which yields that soon led
// to a meeting pay. What the account does not cover keeps the rank from yields for a hundred times as long (decision 0205).
// Times are of now_ns(); it keeps no clock itself.
#pragma once

#include <algorithm>
#include <cstdint>

namespace zerort {

class Yields {
 public:
  static constexpr std::uint64_t kLateNs = 200'000;           // longer than a few ranks take for their parts of a small call
  static constexpr std::uint64_t kSavedNs = 1'000;            // a fifth of what a yield saves: late ones cost more than they take
  static constexpr std::uint64_t kMostSavedNs = 100'000'000;  // what is there to begin with: a job starts with some late ones
  static constexpr std::uint64_t kPause = 100, kLongestPauseNs = 1'000'000'000;

  // The rank has come to another meeting.
  void begin() { was_late_ = false; }

  bool allowed(std::uint64_t now) const { return !was_late_ && now >= none_until_; }

  // Take note of one, after which all are here (`met`) or not.
  void note(std::uint64_t began, std::uint64_t ended, bool met) {
    const std::uint64_t took = ended - began;
    if (took > kLateNs) {
      const std::uint64_t paid = std::min(took, saved_ns_);
      saved_ns_ -= paid;
      none_until_ = ended + std::min(kPause * (took - paid), kLongestPauseNs);
      was_late_ = true;
    } else if (met) {
      saved_ns_ = std::min(saved_ns_ + kSavedNs, kMostSavedNs);
    }
  }

 private:
  std::uint64_t saved_ns_ = kMostSavedNs;  // and not spent
  std::uint64_t none_until_ = 0;
  bool was_late_ = false;  // one of this meeting's: whoever is that busy will be for longer
};

}  // namespace zerort
