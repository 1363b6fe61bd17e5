// Yields: whether it pays to let others run on this core, before a rank that waits for one of them sleeps.
//
// Where ranks take turns on a core, a yield saves what it costs to sleep and be woken. Where a program shares the core that does not
// yield in turn, the rank is back only when that one has used up its time; a sleeper would have been woken sooner. Which of
// the two it was shows afterwards, and once says little: at the start of a job, or between other work, a late one comes now
// and then. So what yields have saved pays for late ones, and what it does not pay for keeps the rank from yields for a hundred
// times as long: they cost no more than they save, and a hundredth of the time (decision 0205).
// Times are of now_ns(); it keeps no clock itself.
#pragma once

#include <algorithm>
#include <cstdint>

namespace zerort {

class Yields {
 public:
  static constexpr std::uint64_t kLateNs = 200'000;        // longer than any rank takes for its part of a small call
  static constexpr std::uint64_t kSavedNs = 5'000;         // by one after which all are here
  static constexpr std::uint64_t kMostSavedNs = 100'000'000;  // what is there to begin with: a job starts with late ones
  static constexpr std::uint64_t kPause = 100, kLongestPauseNs = 1'000'000'000;

  bool are_paid_for(std::uint64_t now) const { return now >= none_until_; }

  // Take note of one: all are here now (`met`), or they are not. Returns whether another may follow at once.
  bool note(std::uint64_t began, std::uint64_t ended, bool met) {
    const std::uint64_t took = ended - began;
    if (met) {  // however late: beside busy programs it makes no difference to count those
      if (took <= kLateNs) saved_ns_ = std::min(saved_ns_ + kSavedNs, kMostSavedNs);
      return false;
    }
    if (took <= kLateNs) return true;
    const std::uint64_t paid = std::min(took, saved_ns_);
    saved_ns_ -= paid;
    none_until_ = ended + std::min(kPause * (took - paid), kLongestPauseNs);
    return false;  // whoever is as busy as that will be for longer
  }

 private:
  std::uint64_t saved_ns_ = kMostSavedNs;  // and not spent
  std::uint64_t none_until_ = 0;
};

}  // namespace zerort
