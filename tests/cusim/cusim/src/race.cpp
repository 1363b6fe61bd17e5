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
  OperationPointer freed;                 // the last free of an array there: its memory lives on in a pool
  bool same_history(const Segment &other) const {
    return writer == other.writer && readers == other.readers && freed == other.freed;
  }
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

// What one operation and an earlier one do to the same bytes without an order.
struct Conflict {
  bool before_reads = false, before_writes = false, now_reads = false, now_writes = false;
  uintptr_t first = 0, end = 0;  // the first range
  size_t more = 0;               // ranges beside it
};
using Conflicts = std::map<OperationPointer, Conflict>;

std::string verb(bool reads, bool writes) { return reads && writes ? "reads and writes" : writes ? "writes" : "reads"; }

void report_conflict(const Operation &before, const Operation &now, const Conflict &c) {
  Allocation allocation;
  std::string where = text("%lu bytes at %#lx", (unsigned long)(c.end - c.first), (unsigned long)c.first);
  if (find_allocation((void *)c.first, &allocation))
    where = text("bytes [%lu, %lu)", (unsigned long)(c.first - allocation.base), (unsigned long)(c.end - allocation.base)) +
            (c.more ? text(" and %zu more ranges", c.more) : "") + " of " + describe(allocation);
  report("race", before.name + " " + verb(c.before_reads, c.before_writes) + " (" + before.place + ") and " + now.name + " " +
                     verb(c.now_reads, c.now_writes) + " (" + now.place + ") have no order on " + where +
                     ". Let one wait for the other: an event, a stream's wait, or a host wait between them.");
}

void add_conflict(Conflicts &conflicts, const OperationPointer &before, bool before_writes, bool now_writes, uintptr_t first,
                  uintptr_t end) {
  Conflict &c = conflicts[before];
  (before_writes ? c.before_writes : c.before_reads) = true;
  (now_writes ? c.now_writes : c.now_reads) = true;
  if (!c.end || first == c.end) {
    c.first = c.end ? c.first : first;
    c.end = end;
  } else if (first < c.first || end > c.end) {
    c.more++;
  }
}

void check(const OperationPointer &now, const Segment &segment, const Access &access, uintptr_t first, Conflicts &conflicts) {
  auto against = [&](const OperationPointer &before, bool before_writes) {
    if (!before || before == now || now->clock.saw(before->moment)) return;
    if (access.frees && before->serial > now->serial) return;  // it uses what the pool has given out again
    add_conflict(conflicts, before, before_writes, access.write, first, segment.end);
  };
  against(segment.writer, true);
  if (segment.freed && now->serial < segment.freed->serial) against(segment.freed, true);
  if (!access.write) return;
  for (const OperationPointer &reader : segment.readers) against(reader, false);
}

void note(const OperationPointer &now, Segment &segment, const Access &access) {
  if (access.frees) {
    segment.freed = now;
    return;
  }
  if (access.write) {
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

void record(const OperationPointer &now, const Access &access, Conflicts &conflicts) {
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
    check(now, next->second, access, at, conflicts);
    note(now, next->second, access);
    at = next->second.end;
    ++next;
  }
  join_equal_neighbours(h, access.first, access.end);
}

Access access_to(const void *pointer, size_t size, bool write) {
  uintptr_t first = device_address((uintptr_t)pointer);
  return {first, first + size, write, false};
}

}  // namespace

Access reads(const void *pointer, size_t size) { return access_to(pointer, size, false); }
Access writes(const void *pointer, size_t size) { return access_to(pointer, size, true); }

Access frees(const void *pointer, size_t size) {
  Access access = writes(pointer, size);
  access.frees = true;
  return access;
}

uint64_t next_serial() {
  static uint64_t count = 0;
  return ++count;
}

void record_accesses(const OperationPointer &operation) {
  if (!settings().races || operation->accesses.empty()) return;
  Conflicts conflicts;
  {
    std::lock_guard<std::mutex> lock(history_mutex);
    for (const Access &access : operation->accesses)
      if (access.first < access.end) record(operation, access, conflicts);
  }
  for (auto &[before, conflict] : conflicts) report_conflict(*before, *operation, conflict);
}

void record_host_access(const std::string &name, const Access &access) {
  auto operation = std::make_shared<Operation>();
  operation->name = name;
  operation->place = "the host";
  operation->accesses = {access};
  {
    std::lock_guard<std::mutex> lock(order());
    operation->serial = next_serial();
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
