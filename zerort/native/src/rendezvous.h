// The place in shared memory where the ranks of a node meet: a barrier, and one slot per rank that says what it came for.
//
//   Control  count · epoch · sleepers, bell · broken      one cache line each
//   Slot[r]  arrived · state · pid · meets · since · core · Call[2]    what rank r is doing, readable by all
//
// A rank's calls take turns in two places: it writes its next call while slower ranks still read the one before. It comes back
// to the first place only after another meeting, at which everybody has done reading it.
// The same layout is read and written by zerort/native/rendezvous.py, the form without a compiler.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace zerort {

constexpr std::size_t kHeaderBytes = 192;  // one rank's call, packed by zerort/comm/guard/call.py
constexpr std::size_t kAgreedBytes = 96;   // its first bytes, which must be equal on all ranks
constexpr std::size_t kCacheLine = 64;

// Where a rank's array lies: in a window that every rank has mapped, or in memory of its own.
struct Location {
  std::int64_t window;  // kPrivate, or the number of a window
  std::uint64_t offset; // bytes from the window's start; for kPrivate the address in the owner's memory
};
constexpr std::int64_t kPrivate = -1;

struct Call {
  Location source;
  Location out;
  std::uint8_t header[kHeaderBytes];
};

struct alignas(kCacheLine) Slot {
  std::atomic<std::uint32_t> arrived;  // the epoch that this rank waits for, or last waited for
  std::atomic<std::uint32_t> state;    // 0 absent, 1 here, 2 left, 3 gave up
  std::uint32_t pid;
  // How many calls this rank has made; its last one is calls[(meets - 1) % 2], whole before it is counted: others read it
  // when this rank does not come.
  std::atomic<std::uint32_t> meets;
  std::atomic<std::uint64_t> since_ns;  // CLOCK_MONOTONIC at the last arrival
  std::atomic<std::uint32_t> core;      // on which it ran then, counted from 1; 0 if it does not say
  alignas(kCacheLine) Call calls[2];
};
static_assert(sizeof(Slot) == 512, "zerort/native/rendezvous.py reads this layout");

struct Control {
  alignas(kCacheLine) std::atomic<std::uint32_t> count;
  alignas(kCacheLine) std::atomic<std::uint32_t> epoch;
  alignas(kCacheLine) std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint32_t> bell;  // moves whenever sleepers are woken, for whatever reason: this is what they sleep on
  // 0, or kBroken and the epoch that is the first nobody will reach: meetings before it have taken place, and count.
  alignas(kCacheLine) std::atomic<std::uint64_t> broken;
};
constexpr std::uint64_t kBroken = std::uint64_t(1) << 32;
static_assert(sizeof(Control) == 4 * kCacheLine, "zerort/native/rendezvous.py reads this layout");

enum class Status : int {
  met = 0,       // every rank is here, and all agree
  waiting = 1,   // time is up, not all are here: wait again, or give up
  disagree = 2,  // every rank is here, with different calls
  broken = 3,    // a rank gave up; nobody will meet here again
};

}  // namespace zerort
