// Rounds: the messages of a long call, several rounds at a time, as often as it is made, with no Python between them.
//
//   start a round while fewer than `depth` are under way ──> wait for the oldest ──> make its copies ──> the next
//
// Their memory must live, and lie where it lay, from `begin` until `wait` has said that they are done. Touches no Python.
#pragma once

#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "wire.h"

namespace zerort {

class Rounds {
 public:
  struct Message {
    int rank;
    char* at;
    std::size_t nbytes;
  };
  struct Copy {
    char* to;
    const char* from;
    std::size_t nbytes;
  };
  struct Round {
    std::vector<Message> sends, receives;
    std::vector<Copy> copies;  // made when its messages are done: until then the wire has what to do, and others wait for it
  };

  Rounds(const Post& post, int tag, std::size_t depth, std::vector<Round> rounds)
      : post_(post), tag_(tag), depth_(depth), rounds_(std::move(rounds)) {}

  // Start from the first round again, when all of the last time are done.
  void begin();

  // Go on until so many rounds are done; start no further ones then, for the caller may have something to do between them. False
  // if that takes longer than `seconds`; see Messages::wait.
  bool wait(std::size_t until, double seconds, double busy);

  std::size_t done() const { return done_; }

 private:
  void start(const Round& round);
  void finish(const Round& round) const;

  const Post post_;
  const int tag_;
  const std::size_t depth_;
  const std::vector<Round> rounds_;
  std::deque<Messages> under_way_;
  std::size_t done_ = 0;
};

}  // namespace zerort
