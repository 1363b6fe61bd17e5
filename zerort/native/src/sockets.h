// Sockets: messages to ranks of other hosts over TCP, without MPI in between (decision 0197).
//
//   a connection for each sender and receiver, made when the first message leaves
//   hello: token of the group · sender · receiver      then for each message: tag and length, 8 bytes │ data
//
// Receives are matched by sender and tag, in order, as MPI does. Data goes straight from and to the arrays of messages. What
// nobody has asked for yet stays in the kernel, with all behind it, and TCP holds its sender up; what was sent for a call that was
// not made (rounds.h) is thrown away by whoever finds it. A connection that breaks is left alone: whoever waits for it looks at the
// clock and at alarms, as with MPI. Touches no Python. Any thread may call it; what one moves for another does not wake that one,
// so nobody sleeps for long.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <sys/types.h>

namespace zerort {

class Sockets {
 public:
  // How many messages of a batch are still under way.
  using Pending = std::shared_ptr<std::atomic<std::size_t>>;
  using Token = std::array<char, 16>;

  // Greetings have one tag, the data of each call has one of its own: 32 bits of the call's number.
  using Tag = std::uint64_t;
  static constexpr Tag kGreeting = 1;
  static Tag data_of(std::uint64_t call) { return Tag(std::uint32_t(call)) << 1; }

  struct Peer {
    int rank;
    std::uint32_t address;  // IPv4, as a number of this machine
    std::uint16_t port;
  };

  // `listener` is a socket that listens, and belongs to this object from now on.
  Sockets(int rank, const Token& token, int listener, const std::vector<Peer>& peers);
  ~Sockets() { close(); }
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  bool carries(int rank) const { return outgoing_.count(rank) != 0; }

  // Where a part of a message goes.
  struct Room {
    char* to;
    std::size_t nbytes;
  };

  // Begin. The memory must live until `pending`, which is made one more here, is less again.
  void send(int rank, Tag tag, const void* from, std::size_t nbytes, const Pending& pending);
  // A message fills the rooms in order. It will have the likely length, or another that fits; 0: nobody knows.
  void receive(int rank, Tag tag, std::vector<Room> rooms, std::size_t likely_nbytes, const Pending& pending);

  // From now on this rank makes the call with that number: data of earlier ones is for nobody. Whoever receives says so before, so
  // ranks that only send or meet may be behind. A sender is one call ahead at the most: all ranks have to begin that one before it
  // makes another.
  void turn_to(std::uint64_t call);

  // Of these messages send no more, but what others take for the rest of one that has begun: their memory is free.
  void take_back(const Pending& pending);

  // Move what can be moved now; of what comes for `mine` as little as brings its end nearer.
  void progress(const Pending& mine);

  // Sleep until something of `mine` can be moved, or for that long.
  void sleep(const Pending& mine, double seconds);

  // Seconds until the kernel of the farthest rank that was sent something has said that it came; 0: unknown.
  double round_trip();

  // Have the kernel hold no more than that of what a connection sends, instead of as much as it likes.
  void limit_buffers(int nbytes);

  // Leave congestion to what the machine uses, though that be BBR, which is made for long ways; until then it is not used.
  void go_far();

  // Break all connections: what is under way stays so.
  void close();

 private:
  static constexpr std::size_t kHello = 24, kHead = 8;

  struct Sending {
    char head[kHello];  // of a message, or the hello
    std::size_t head_nbytes;
    const char* from;
    std::size_t nbytes;
    Pending pending;
    std::size_t done = 0;         // of both
    std::vector<char> instead{};  // of what lay at `from`, if it was taken back
  };
  struct Outgoing {
    Peer peer;
    int socket = -1;
    bool is_broken = false;
    std::deque<Sending> queue;
  };
  struct Receiving {
    Tag tag;
    std::vector<Room> rooms;
    std::size_t likely_nbytes;
    Pending pending;
  };
  struct Incoming {
    int rank = -1;
    int socket = -1;
    bool is_broken = false;
    char head[kHead];
    std::size_t head_done = 0;
    std::size_t nbytes = 0, done = 0;  // of the message whose head has come
    Tag tag = 0;                       // of that one
    bool is_unasked = false;           // nobody has asked for that one yet
    int low_water = 1;                 // bytes for which the kernel wakes this rank
    std::deque<Receiving> queue;       // the message under way is for the first with its tag

    // Bytes of the message under way, and of them those that have not come; as is likely, if its head has not either.
    std::size_t length() const;
    std::size_t rest() const;
    // Everything that was asked for is for `mine`.
    bool is_for(const Pending& mine) const;
    // A message for `mine` is missing, so short that it comes whether it is read or not: until then no other matters to `mine`.
    // After calls that differ it may lie behind data that is thrown away; then it comes when this connection is read again.
    bool holds_up(const Pending& mine) const;
  };
  struct Stranger {
    int socket;
    char hello[kHello];
    std::size_t done = 0;
  };

  void connect(Outgoing& to);
  void write(Outgoing& to);
  void read(Incoming& from);
  template <typename Use>
  void for_each_that_matters(const Pending& mine, const Use& use);
  bool take(Incoming& from, const Room* rooms, std::size_t& done, std::size_t nbytes);
  bool throw_away(Incoming& from);
  bool is_late(const Incoming& from) const;
  bool note(Incoming& from, ssize_t came);
  void wake_for_rest(Incoming& from);
  void admit();
  bool hear_hello(Stranger& stranger);
  bool lacks_connection() const;

  const int rank_;
  const Token token_;
  int listener_;
  int send_buffer_ = 0;  // bytes that the kernel may hold; 0: as it likes
  bool is_far_ = false;
  std::int64_t now_ = -1;  // the call that is made; before the first
  std::mutex mutex_;
  std::map<int, Outgoing> outgoing_;  // by rank
  std::map<int, Incoming> incoming_;
  std::vector<Outgoing*> writing_;  // those with a queue
  std::vector<Incoming*> reading_;
  std::vector<Stranger> strangers_;  // have connected, but not said who they are
};

}  // namespace zerort
