#include "event.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>

#include "capture.h"
#include "device.h"
#include "status.h"
#include "stream.h"

namespace cusim {

namespace {

using Time = std::chrono::steady_clock::time_point;

struct Place {  // one recording of an event
  std::mutex mutex;
  std::condition_variable passed_;
  bool passed = false;
  Time time;
  Clock clock;  // of everything before it

  void pass() {
    std::lock_guard<std::mutex> lock(mutex);
    time = std::chrono::steady_clock::now();
    passed = true;
    passed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    passed_.wait(lock, [&] { return passed; });
  }
  bool done() {
    std::lock_guard<std::mutex> lock(mutex);
    return passed;
  }
};

struct Event {
  int device;
  unsigned flags;
  std::shared_ptr<Place> place;  // null: never recorded, which counts as done
  bool captured = false;         // recorded in a capture: it has no place in time
};

std::mutex events_mutex;
std::map<void *, std::shared_ptr<Event>> &events() {
  static auto *kept = new std::map<void *, std::shared_ptr<Event>>;
  return *kept;
}

bool find(void *handle, Event *out) {
  std::lock_guard<std::mutex> lock(events_mutex);
  auto found = events().find(handle);
  if (found == events().end()) return false;
  *out = *found->second;
  return true;
}

}  // namespace

void *create_event(unsigned flags) {
  auto event = std::make_shared<Event>(Event{current_device(), flags, nullptr, false});
  std::lock_guard<std::mutex> lock(events_mutex);
  events()[event.get()] = event;
  return event.get();
}

int destroy_event(void *handle) {
  std::lock_guard<std::mutex> lock(events_mutex);
  return events().erase(handle) ? kSuccess : kInvalidHandle;
}

int record_event(void *handle, const void *stream_handle) {
  Event event;
  StreamPointer stream = find_stream(stream_handle);
  if (!stream || !find(handle, &event) || stream->device != event.device) return kInvalidHandle;
  if (is_capturing(stream_handle)) {
    std::lock_guard<std::mutex> lock(events_mutex);
    auto found = events().find(handle);
    if (found != events().end()) found->second->captured = true;
    return kSuccess;
  }
  auto place = std::make_shared<Place>();
  submit_record(stream, "event record", &place->clock, [place](Operation &) { place->pass(); });
  std::lock_guard<std::mutex> lock(events_mutex);
  auto found = events().find(handle);
  if (found != events().end()) found->second->place = place, found->second->captured = false;
  return kSuccess;
}

int query_event(void *handle) {
  Event event;
  if (!find(handle, &event)) return kInvalidHandle;
  if (event.captured) return kCapturedEvent;
  if (!event.place) return kSuccess;
  if (!event.place->done()) return kNotReady;
  host_saw(event.place->clock);
  return kSuccess;
}

int synchronize_event(void *handle) {
  Event event;
  if (!find(handle, &event)) return kInvalidHandle;
  if (!event.place) return kSuccess;
  event.place->wait();
  host_saw(event.place->clock);
  return kSuccess;
}

int elapsed_time(float *milliseconds, void *from, void *to) {
  Event a, b;
  if (!find(from, &a) || !find(to, &b) || ((a.flags | b.flags) & kDisableTiming)) return kInvalidHandle;
  if (!a.place || !b.place) return kInvalidHandle;
  if (!a.place->done() || !b.place->done()) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(b.place->time - a.place->time).count();
  return kSuccess;
}

int stream_wait_event(const void *stream_handle, void *handle) {
  Event event;
  StreamPointer stream = find_stream(stream_handle);
  if (!stream || !find(handle, &event)) return kInvalidHandle;
  auto place = event.place;
  if (place) submit_wait(stream, "event wait", place->clock, [place](Operation &) { place->wait(); });
  return kSuccess;
}

}  // namespace cusim
