// Sockets: messages to ranks of other hosts over TCP, without MPI in between (decision 0197).
//
//   a connection for each sender and receiver, made when the first message leaves
//   hello: token of the group · sender · receiver      then for each message: tag and length, 8 bytes │ data
//
// Receives are matched by sender and tag, in order, as MPI does. Data goes straight from and to the arrays of messages. What
// nobody has asked for yet stays in the kernel, and TCP holds its sender up. A connection that breaks is left alone: whoever
// waits for it looks at the clock and at alarms, as with MPI. Touches no Python. Any thread may call it; what one moves for another
// does not wake that one, so nobody sleeps for long.
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

namespace zerort {

class Sockets {
 public:
  // How many messages of a batch are still under way.
  using Pending = std::shared_ptr<std::atomic<std::size_t>>;
  using Token = std::array<char, 16>;

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

  // Begin. The memory must live until `pending`, which is made one more here, is less again.
  void send(int rank, int tag, const void* from, std::size_t nbytes, const Pending& pending);
  void receive(int rank, int tag, void* to, std::size_t room, const Pending& pending);

  // Move what can be moved now.
  void progress();

  // Sleep until something can be moved, or for that long.
  void sleep(double seconds);

  // Seconds until the kernel of the farthest rank that was sent something has said that it came; 0: unknown.
  double round_trip();

  // Have the kernel hold no more than that of what a connection sends, instead of as much as it likes.
  void limit_buffers(int nbytes);

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
    std::size_t done = 0;  // of both
  };
  struct Outgoing {
    Peer peer;
    int socket = -1;
    bool is_broken = false;
    std::deque<Sending> queue;
  };
  struct Receiving {
    int tag;
    char* to;
    std::size_t room;
    Pending pending;
  };
  struct Incoming {
    int socket = -1;
    bool is_broken = false;
    char head[kHead];
    std::size_t head_done = 0;
    std::size_t nbytes = 0, done = 0;  // of the message whose head has come
    bool is_unasked = false;           // nobody has asked for that one yet
    int low_water = 1;                 // bytes for which the kernel wakes this rank
    std::deque<Receiving> queue;       // the message under way is for the first with its tag
  };
  struct Stranger {
    int socket;
    char hello[kHello];
    std::size_t done = 0;
  };

  void connect(Outgoing& to);
  void write(Outgoing& to);
  void read(Incoming& from);
  void wake_for(Incoming& from, std::size_t rest);
  void admit();
  bool hear_hello(Stranger& stranger);
  bool lacks_connection() const;

  const int rank_;
  const Token token_;
  int listener_;
  int send_buffer_ = 0;  // bytes that the kernel may hold; 0: as it likes
  std::mutex mutex_;
  std::map<int, Outgoing> outgoing_;  // by rank
  std::map<int, Incoming> incoming_;
  std::vector<Outgoing*> writing_;  // those with a queue
  std::vector<Incoming*> reading_;
  std::vector<Stranger> strangers_;  // have connected, but not said who they are
};

}  // namespace zerort
