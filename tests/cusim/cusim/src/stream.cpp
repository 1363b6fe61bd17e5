#include "stream.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>

#include "capture.h"
#include "device.h"
#include "memory.h"
#include "report.h"
#include "settings.h"
#include "status.h"

namespace cusim {

std::mutex &order() {
  static std::mutex *kept = new std::mutex;
  return *kept;
}

Clock &host_clock() {
  static Clock *kept = new Clock;
  return *kept;
}

namespace {

struct Registry {  // never destroyed: workers outlive static destructors
  std::mutex mutex;
  std::map<const void *, StreamPointer> by_handle;
  std::set<StreamPointer> running;  // from creation until the last operation of a destroyed stream
  std::vector<StreamPointer> legacy;
  int lanes = kHostLane + 1;
};

Registry &registry() {
  static Registry *kept = [] {
    auto *fresh = new Registry;
    fresh->legacy.resize(device_count());
    return fresh;
  }();
  return *kept;
}

int next_lane() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().lanes++;
}

std::string stream_name(int lane, int device, bool legacy) {
  std::string of = device_count() > 1 ? " of device " + std::to_string(device) : "";
  return (legacy ? "the default stream" : "stream " + std::to_string(lane)) + of;
}

// A number that depends on the seed, the process's rank, the lane and the count alone: a seed repeats its delays.
uint64_t draw(uint64_t lane, uint64_t count) {
  static const char *rank = [] {
    for (const char *name : {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"})
      if (const char *value = getenv(name)) return value;
    return "0";
  }();
  uint64_t x = seed() * 0x9E3779B97F4A7C15u + (uint64_t)atoi(rank) * 0xD1B54A32D192ED03u + lane * 0x8CB92BA72F3D8DD7u + count;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// In microseconds. Half of all operations start at once, most others a little late, one in sixteen by up to the longest delay.
uint64_t delay_of(uint64_t drawn) {
  uint64_t longest = settings().longest_delay, fate = drawn & 15, length = drawn >> 8;
  if (!longest || fate < 8) return 0;
  return length % (fate == 15 ? longest : std::max<uint64_t>(longest / 16, 1));
}

// An operation owns what it is going to write from its turn on: whoever reads it too early shall not find the old bytes,
// which may happen to be right. What it also reads stays.
void scribble(const Operation &operation) {
  for (const Access &write : operation.accesses) {
    bool kept = !write.write || write.frees;
    for (const Access &read : operation.accesses)
      kept = kept || (!read.write && read.first < write.end && write.first < read.end);
    if (!kept) poison(worker_view((void *)write.first), write.end - write.first);
  }
}

std::vector<StreamPointer> streams_of(int device) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::vector<StreamPointer> found;
  for (const StreamPointer &stream : registry().running)
    if (stream->device == device) found.push_back(stream);
  return found;
}

StreamPointer existing_legacy_stream(int device) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().legacy[device];
}

}  // namespace

struct Submission {
  static void start(const StreamPointer &stream) {
    {
      std::lock_guard<std::mutex> lock(registry().mutex);
      registry().running.insert(stream);
    }
    std::thread([stream] {
      use_device(stream->device);
      make_context(true);
      stream->work();
      std::lock_guard<std::mutex> lock(registry().mutex);
      registry().running.erase(stream);
    }).detach();
  }

  static Stream::Ticket push(const StreamPointer &s, std::string name, std::vector<Access> accesses, const Clock *seen, Body body,
                             Clock *clock = nullptr) {
    auto operation = std::make_shared<Operation>();
    operation->name = std::move(name);
    operation->place = s->name;
    operation->accesses = std::move(accesses);
    std::vector<StreamPointer> others;
    if (s->legacy) others = streams_of(s->device);
    else if (!(s->flags & kNonBlocking))
      if (StreamPointer legacy = existing_legacy_stream(s->device)) others.push_back(legacy);

    std::lock_guard<std::mutex> ordered(order());
    std::vector<std::pair<StreamPointer, Stream::Ticket>> after;
    for (const StreamPointer &other : others)
      if (other != s && !(other->flags & kNonBlocking)) {
        after.push_back({other, last(*other)});
        s->clock_.join(other->clock_);
      }
    s->clock_.join(host_clock());
    if (seen) s->clock_.join(*seen);
    operation->serial = next_serial();
    operation->moment = s->clock_.tick(s->lane);
    operation->clock = s->clock_;
    if (clock) *clock = s->clock_;
    std::lock_guard<std::mutex> lock(s->mutex_);
    s->queue_.push_back({std::move(operation), std::move(body), seen == nullptr, std::move(after)});
    s->added_.notify_one();
    return ++s->submitted_;
  }

  static Stream::Ticket last(Stream &stream) {
    std::lock_guard<std::mutex> lock(stream.mutex_);
    return stream.submitted_;
  }

  static Stream::Ticket snapshot(Stream &stream, Clock *clock) {
    std::lock_guard<std::mutex> ordered(order());
    *clock = stream.clock_;
    return last(stream);
  }

  static void close(Stream &stream) {
    std::lock_guard<std::mutex> lock(stream.mutex_);
    stream.closed_ = true;
    stream.added_.notify_one();
  }
};

Stream::Stream(int device, unsigned flags, int priority, bool legacy)
    : device(device), flags(flags), priority(priority), legacy(legacy), lane(next_lane()), name(stream_name(lane, device, legacy)) {}

void Stream::delay(Ticket ticket, const Operation &operation) const {
  if (!seed()) return;
  uint64_t time = delay_of(draw((uint64_t)lane, ticket));
  trace("%s: %s starts %lu us late", name.c_str(), operation.name.c_str(), (unsigned long)time);
  scribble(operation);
  usleep((useconds_t)time);
}

void Stream::work() {
  for (Ticket ticket = 1;; ticket++) {
    Queued next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      added_.wait(lock, [&] { return !queue_.empty() || closed_; });
      if (queue_.empty()) return;
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    for (auto &[other, until] : next.after) other->wait(until);
    if (next.late) delay(ticket, *next.operation);
    next.body(*next.operation);
    record_accesses(next.operation);
    next = {};  // what the body kept alive goes before anyone is told
    std::lock_guard<std::mutex> lock(mutex_);
    finished_count_ = ticket;
    finished_.notify_all();
  }
}

void Stream::wait(Ticket ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [&] { return finished_count_ >= ticket; });
}

bool Stream::done(Ticket ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return finished_count_ >= ticket;
}

void *create_stream(unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>(current_device(), flags, priority, false);
  Submission::start(stream);
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().by_handle[stream.get()] = stream;
  return stream.get();
}

static StreamPointer legacy_stream(int device) {
  static std::mutex creation;
  std::lock_guard<std::mutex> creating(creation);
  if (StreamPointer stream = existing_legacy_stream(device)) return stream;
  auto stream = std::make_shared<Stream>(device, 0, 0, true);
  Submission::start(stream);
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().legacy[device] = stream;
  return stream;
}

StreamPointer find_stream(int device, const void *handle) {
  auto number = (uintptr_t)handle;
  if (number == 0 || number == 1) {
    return legacy_stream(device);
  }
  if (number == 2) {
    static thread_local std::map<int, StreamPointer> mine;
    StreamPointer &stream = mine[device];
    if (!stream) {
      stream = std::make_shared<Stream>(device, 0, 0, false);
      Submission::start(stream);
    }
    return stream;
  }
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().by_handle.find(handle);
  return found == registry().by_handle.end() ? nullptr : found->second;
}

StreamPointer find_stream(const void *handle) { return find_stream(current_device(), handle); }

int destroy_stream(void *handle) {
  StreamPointer stream;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = registry().by_handle.find(handle);
    if (found == registry().by_handle.end()) return kInvalidHandle;
    stream = found->second;
    registry().by_handle.erase(found);
  }
  Submission::close(*stream);  // what was submitted still runs
  return kSuccess;
}

Stream::Ticket submit(const StreamPointer &stream, std::string name, std::vector<Access> accesses, Body body) {
  if (is_capturing(stream.get())) report("capture", name + " on a stream that is captured: graphs are not emulated");
  Stream::Ticket ticket = Submission::push(stream, std::move(name), std::move(accesses), nullptr, std::move(body));
  delay_host();
  return ticket;
}

Stream::Ticket submit_wait(const StreamPointer &stream, std::string name, const Clock &seen, Body body) {
  return Submission::push(stream, std::move(name), {}, &seen, std::move(body));
}

Stream::Ticket submit_record(const StreamPointer &stream, std::string name, Clock *clock, Body body) {
  return Submission::push(stream, std::move(name), {}, nullptr, std::move(body), clock);
}

Stream::Ticket snapshot(const StreamPointer &stream, Clock *clock) { return Submission::snapshot(*stream, clock); }

void host_saw(const Clock &clock) {
  std::lock_guard<std::mutex> ordered(order());
  host_clock().join(clock);
}

void synchronize(const StreamPointer &stream) {
  Clock clock;
  stream->wait(snapshot(stream, &clock));
  host_saw(clock);
}

bool query(const StreamPointer &stream) {
  Clock clock;
  if (!stream->done(snapshot(stream, &clock))) return false;
  host_saw(clock);
  return true;
}

bool is_idle(const StreamPointer &stream) {
  Clock unseen;
  return stream->done(snapshot(stream, &unseen));
}

void synchronize_device(int device) {
  for (const StreamPointer &stream : streams_of(device)) synchronize(stream);
}

void synchronize_all() {
  for (int device = 0; device < device_count(); device++) synchronize_device(device);
}

void delay_host() {
  static thread_local uint64_t calls = 0;
  if (!seed()) return;
  uint64_t drawn = draw(kHostLane, ++calls);
  if ((drawn >> 4 & 7) == 0) usleep((useconds_t)delay_of(drawn));
}

}  // namespace cusim
