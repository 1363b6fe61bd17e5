// Streams: one worker thread and one queue each; nothing is done by the thread that submits.
//
// Two lanes of work meet only where CUDA says so: in one stream, through an event, through a host wait, and between the
// legacy default stream and the blocking streams of its device. Each of these also joins the clocks of the race check.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"
#include "race.h"

namespace cusim {

constexpr unsigned kNonBlocking = 1;  // cudaStreamNonBlocking

// What a stream runs. It may add to the operation's accesses what it finds out while running.
using Body = std::function<void(Operation &)>;

class Stream {
 public:
  using Ticket = uint64_t;  // the n-th operation of a stream

  Stream(int device, unsigned flags, int priority, bool legacy);

  const int device;
  const unsigned flags;
  const int priority;
  const bool legacy;
  const int lane;
  const std::string name;  // "stream 3"

  void wait(Ticket ticket);
  bool done(Ticket ticket);

 private:
  struct Queued {
    std::shared_ptr<Operation> operation;
    Body body;
    bool late;  // may be delayed
    std::vector<std::pair<std::shared_ptr<Stream>, Ticket>> after;
  };
  friend struct Submission;

  void work();
  void delay(Ticket ticket, const Operation &operation) const;

  std::mutex mutex_;
  std::condition_variable added_, finished_;
  std::deque<Queued> queue_;
  Ticket submitted_ = 0, finished_count_ = 0;
  bool closed_ = false;
  Clock clock_;  // of everything submitted so far; under order()
};

using StreamPointer = std::shared_ptr<Stream>;

// Handles: 0 and 1 are the legacy default stream of the thread's device, 2 is the thread's own default stream.
void *create_stream(unsigned flags, int priority);
StreamPointer find_stream(const void *handle);
StreamPointer find_stream(int device, const void *handle);
int destroy_stream(void *handle);

// Puts work at the end of a stream. The accesses known beforehand go with it; the race check sees them once it has run.
Stream::Ticket submit(const StreamPointer &stream, std::string name, std::vector<Access> accesses, Body body);
// The same, undelayed and with a clock to join: an event's wait.
Stream::Ticket submit_wait(const StreamPointer &stream, std::string name, const Clock &seen, Body body);
// The same, telling the clock of everything up to and with it: an event's record.
Stream::Ticket submit_record(const StreamPointer &stream, std::string name, Clock *clock, Body body);
// The clock of all that a stream has been given, and its last ticket.
Stream::Ticket snapshot(const StreamPointer &stream, Clock *clock);

// Host waits: the host has then seen what the stream did.
void host_saw(const Clock &clock);
void synchronize(const StreamPointer &stream);
bool query(const StreamPointer &stream);
bool is_idle(const StreamPointer &stream);  // asks without the host having seen anything
void synchronize_device(int device);
void synchronize_all();

// With CUSIM_SEED: now and then the host is late, so that streams run ahead of it.
void delay_host();

}  // namespace cusim
