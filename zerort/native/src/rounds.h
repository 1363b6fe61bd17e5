// Rounds: the messages of a long call, several rounds at a time, as often as it is made, with no Python between them.
//
//   start a round while fewer than `depth` are under way ──> wait for the oldest ──> make its copies ──> the next
//
// Ahead: what it sends in the first of them. That need not wait until all have agreed on the call: the wire is busy meanwhile.
// Nobody receives it before; what was sent for a call that others do not make is thrown away (sockets.h, decision 0204).
//
// Memory must live, and lie where it lay, from `begin` until `wait` has said that all is done; that of what is sent ahead from
// `Ahead::send` until then, or until it is taken back. Touches no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "wire.h"

namespace zerort {

class Ahead {
 public:
  struct Message {
    int rank;
    const char* from;
    std::size_t nbytes;
  };

  explicit Ahead(const Post& post) : post_(post) {}

  // From now on these are sent, of each round: parts of an array.
  void aim(const char* array, std::vector<std::vector<Message>> rounds) {
    array_ = array;
    rounds_ = std::move(rounds);
  }

  bool is_from(const char* array) const { return array_ == array && array != nullptr; }

  void send(std::uint64_t call);

  // The call that it has sent for last: for tests.
  std::optional<std::uint64_t> call() const { return call_; }

  // Return what was sent for the next round of a call, and is this one's to wait for; nothing if nothing was.
  std::optional<Messages> take(std::uint64_t call);

  // The call is not made.
  void take_back();

 private:
  const Post post_;
  const char* array_ = nullptr;
  std::vector<std::vector<Message>> rounds_;
  std::deque<Messages> under_way_;  // by round
  std::optional<std::uint64_t> call_;
};

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

  // What `ahead` has sent the rounds do not send again; there may be none.
  Rounds(const Post& post, std::size_t depth, std::vector<Round> rounds, std::shared_ptr<Ahead> ahead)
      : post_(post), depth_(depth), rounds_(std::move(rounds)), ahead_(std::move(ahead)) {}

  // Start from the first round again, for the call with this number, when all of the last time are done.
  void begin(std::uint64_t call);

  // Go on until so many rounds are done; start no further ones then, for the caller may have something to do between them. False
  // if that takes longer than `seconds`; see Messages::wait.
  bool wait(std::size_t until, double seconds, double busy);

  std::size_t done() const { return done_; }

 private:
  void start(const Round& round);
  void finish(const Round& round) const;

  const Post post_;
  const std::size_t depth_;
  const std::vector<Round> rounds_;
  const std::shared_ptr<Ahead> ahead_;
  std::uint64_t call_ = 0;
  std::deque<Messages> under_way_;
  std::size_t done_ = 0;
};

}  // namespace zerort
