// Race check: two accesses to the same bytes, at least one of them a write, must have an order.
//
// The order is that of the vector clocks (clock.h), so a race is reported even when this run got the right answer. Accesses
// arrive when an operation has run, before anyone is told that it is done; whatever is ordered therefore arrives in order,
// and it is enough to keep, per byte, the last write and the reads since.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"

namespace cusim {

struct Access {
  uintptr_t first = 0;  // a device address, not one of the worker view
  uintptr_t end = 0;
  bool write = false;
  bool frees = false;  // ends the use of the bytes: must come after what was submitted before it, and binds nothing after it
};

Access reads(const void *pointer, size_t size);
Access writes(const void *pointer, size_t size);
Access frees(const void *pointer, size_t size);

struct Operation {
  std::string name;   // "kernel adamw", "copy of 4096 bytes to the host"
  std::string place;  // "stream 3", "the host"
  uint64_t serial = 0;  // in the order of submission, over all streams
  Moment moment;
  Clock clock;
  std::vector<Access> accesses;
};

// Checks an operation's accesses against what came before, and keeps them.
void record_accesses(const std::shared_ptr<const Operation> &operation);

// Counts operations; hold `order()`.
uint64_t next_serial();

// An access by host code that the emulator is told of (`cusim.host_reads`, freeing, unregistering).
void record_host_access(const std::string &name, const Access &access);

// Memory that is gone has no history.
void forget_accesses(uintptr_t first, size_t size);

}  // namespace cusim
