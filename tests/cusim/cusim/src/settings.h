// Settings: everything the emulator takes from the environment, read once. The table is in README.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace cusim {

struct Settings {
  int devices;              // CUSIM_DEVICES
  size_t device_bytes;      // CUSIM_MEM_MB
  size_t pinned_bytes;      // CUSIM_PINNED_MB: what may be pinned in all, 0 = no limit
  uint64_t seed;            // CUSIM_SEED: 0 = streams run as fast as they can
  unsigned longest_delay;   // CUSIM_DELAY_US: the longest random delay, in microseconds
  int poison;               // CUSIM_POISON: the byte that fresh and freed memory holds, -1 = none
  bool guard;               // CUSIM_GUARD: host code cannot read or write device memory
  bool races;               // CUSIM_RACES: check every pair of accesses for an order
  bool trace;               // CUSIM_TRACE: print calls
  bool keep;                // CUSIM_KEEP: keep the directories kernels are compiled in
  double nccl_timeout;      // CUSIM_NCCL_TIMEOUT, in seconds
  int nccl_version;         // CUSIM_NCCL_VERSION: what NCCL says of itself
  int communicators;        // CUSIM_NCCL_COMMUNICATORS: that may be opened, 0 = no limit
  std::string report;       // CUSIM_REPORT: a directory that gets one file of findings per process
  std::string device_headers;  // CUSIM_DEVICE_HEADERS: set by `cusim.start`
  std::string compiler;        // CUSIM_CXX
  std::string compiler_flags;  // CUSIM_CXXFLAGS
};

const Settings &settings();

// CUSIM_SEED, or what `cusim.reseed` has set since.
uint64_t seed();

// Prints one line to stderr when CUSIM_TRACE is set.
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace cusim
