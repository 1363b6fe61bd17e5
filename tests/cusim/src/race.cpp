#include "race.h"

#include <algorithm>
#include <map>

#include "memory.h"
#include "report.h"
#include "settings.h"

namespace cusim {

namespace {

using OperationPointer = std::shared_ptr<const Operation>;

struct Segment {  // bytes [key, end) with one history
  uintptr_t end = 0;
  OperationPointer writer;
  std::vector<OperationPointer> readers;  // since that write, at most one per lane
  bool same_history(const Segment &other) const { return writer == other.writer && readers == other.readers; }
};

using History = std::map<uintptr_t, Segment>;

std::mutex history_mutex;
History &history() {
  static History *kept = new History;
  return *kept;
}

// Cuts the segment that spans `at`, so that one begins there.
void cut(History &h, uintptr_t at) {
  auto next = h.lower_bound(at);
  if (next != h.end() && next->first == at) return;
  if (next == h.begin()) return;
  auto spanning = std::prev(next);
  if (spanning->second.end <= at) return;
  Segment rest = spanning->second;
  spanning->second.end = at;
  h.emplace_hint(next, at, rest);
}

void join_equal_neighbours(History &h, uintptr_t first, uintptr_t end) {
  auto at = h.lower_bound(first);
  if (at != h.begin()) --at;
  while (at != h.end() && at->first <= end) {
    auto next = std::next(at);
    if (next == h.end()) return;
    if (at->second.end == next->first && at->second.same_history(next->second)) {
      at->second.end = next->second.end;
      h.erase(next);
    } else {
      at = next;
    }
  }
}

void report_race(const Operation &before, bool before_writes, const Operation &now, bool now_writes, uintptr_t first, uintptr_t end) {
  Allocation allocation;
  std::string where = find_allocation((void *)first, &allocation)
                          ? text("bytes [%lu, %lu) of ", (unsigned long)(first - allocation.base), (unsigned long)(end - allocation.base)) +
                                describe(allocation)
                          : text("%lu bytes at %#lx", (unsigned long)(end - first), (unsigned long)first);
  report("race", text("%s %s (%s) and %s %s (%s) have no order on ", before.name.c_str(), before_writes ? "writes" : "reads",
                      before.place.c_str(), now.name.c_str(), now_writes ? "writes" : "reads", now.place.c_str()) +
                     where + ". Let one wait for the other: an event, a stream's wait, or a host wait between them.");
}

void check(const OperationPointer &now, const Segment &segment, bool write, uintptr_t first) {
  const OperationPointer &writer = segment.writer;
  if (writer && writer != now && !now->clock.saw(writer->moment))
    report_race(*writer, true, *now, write, first, segment.end);
  if (!write) return;
  for (const OperationPointer &reader : segment.readers)
    if (reader != now && !now->clock.saw(reader->moment)) report_race(*reader, false, *now, true, first, segment.end);
}

void note(const OperationPointer &now, Segment &segment, bool write) {
  if (write) {
    segment.writer = now;
    segment.readers.clear();
    return;
  }
  for (OperationPointer &reader : segment.readers)
    if (reader->moment.lane == now->moment.lane) {
      reader = now;
      return;
    }
  segment.readers.push_back(now);
}

void record(const OperationPointer &now, const Access &access) {
  History &h = history();
  cut(h, access.first);
  cut(h, access.end);
  uintptr_t at = access.first;
  for (auto next = h.lower_bound(at); at < access.end;) {
    if (next == h.end() || next->first > at) {  // bytes without a history
      Segment fresh;
      fresh.end = next == h.end() ? access.end : std::min(access.end, next->first);
      next = h.emplace_hint(next, at, fresh);
    }
    check(now, next->second, access.write, at);
    note(now, next->second, access.write);
    at = next->second.end;
    ++next;
  }
  join_equal_neighbours(h, access.first, access.end);
}

Access access_to(const void *pointer, size_t size, bool write) {
  uintptr_t first = device_address((uintptr_t)pointer);
  return {first, first + size, write};
}

}  // namespace

Access reads(const void *pointer, size_t size) { return access_to(pointer, size, false); }
Access writes(const void *pointer, size_t size) { return access_to(pointer, size, true); }

void record_accesses(const OperationPointer &operation) {
  if (!settings().races || operation->accesses.empty()) return;
  std::lock_guard<std::mutex> lock(history_mutex);
  for (const Access &access : operation->accesses)
    if (access.first < access.end) record(operation, access);
}

void record_host_access(const std::string &name, const Access &access) {
  auto operation = std::make_shared<Operation>();
  operation->name = name;
  operation->place = "the host";
  operation->accesses = {access};
  {
    std::lock_guard<std::mutex> lock(order());
    operation->moment = host_clock().tick(kHostLane);
    operation->clock = host_clock();
  }
  record_accesses(operation);
}

void forget_accesses(uintptr_t first, size_t size) {
  std::lock_guard<std::mutex> lock(history_mutex);
  History &h = history();
  cut(h, first);
  cut(h, first + size);
  h.erase(h.lower_bound(first), h.lower_bound(first + size));
}

}  // namespace cusim

// For Python: `cusim.host_reads(array)` and `cusim.host_writes(array)`.
extern "C" void cusim_host_access(const char *name, const void *pointer, size_t size, int write) {
  cusim::record_host_access(name, write ? cusim::writes(pointer, size) : cusim::reads(pointer, size));
}
