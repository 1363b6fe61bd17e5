// What the parts of the harness share: ranks as threads, memory they meet in, seeds, and checks that end the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include "rendezvous.h"

namespace harness {

using zerort::kCacheLine;

#define EXPECT(condition)                                                                          \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      std::fprintf(stderr, "%s:%d: Expected %s, got otherwise.\n", __FILE__, __LINE__, #condition); \
      std::_Exit(70);                                                                              \
    }                                                                                              \
  } while (false)

inline std::uint64_t mix(std::uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// One per thread; the same on all of them if made from the same numbers.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed)) {}
  std::uint64_t below(std::uint64_t bound) { return (state_ = mix(state_)) % bound; }

 private:
  std::uint64_t state_;
};

// Let another thread go first, sometimes, and for a while of seeded length.
inline void stumble(Random& random) {
  switch (random.below(8)) {
    case 0:
    case 1:
      sched_yield();
      break;
    case 2: {
      const timespec nap = {0, long(random.below(30000))};
      nanosleep(&nap, nullptr);
      break;
    }
    case 3:
      for (volatile std::uint64_t left = random.below(2000); left > 0; left = left - 1) {
      }
      break;
    default:
      break;
  }
}

// Shared memory as ranks map it, zeroed; here one mapping for all of them, so that ThreadSanitizer knows it as the same.
class Mapping {
 public:
  explicit Mapping(std::size_t nbytes) : nbytes_(nbytes) {
    data_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(data_ != MAP_FAILED);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data_, nbytes_); }
  char* data() const { return static_cast<char*>(data_); }
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(data_); }

 private:
  std::size_t nbytes_;
  void* data_;
};

// The place where `size` ranks meet.
class Place : public Mapping {
 public:
  explicit Place(int size) : Mapping(sizeof(zerort::Control) + std::size_t(size) * sizeof(zerort::Slot)) {}
  zerort::Slot& slot(int rank) const {
    return reinterpret_cast<zerort::Slot*>(data() + sizeof(zerort::Control))[rank];
  }
};

// Run body(rank) on `size` threads.
template <typename Body>
void on_ranks(int size, Body body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; rank++) threads.emplace_back([&body, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

// Faults of the harness itself, one of which may be asked for: the sanitizer must find it.
enum class Fault { none, counter, parting, overflow, undefined };

struct Trial {
  int size;
  std::uint64_t seed;
  int rounds;
  Fault fault;
};

// What was done, by name; only from the main thread.
using Figures = std::map<std::string, std::uint64_t>;

void meet_often(const Trial& trial, Figures& figures);         // meetings.cpp
void break_meetings(const Trial& trial, Figures& figures);     // meetings.cpp
void check_account_of_yields(Figures& figures);                // meetings.cpp
void call_prepared(const Trial& trial, Figures& figures);      // calls.cpp
void read_peers(const Trial& trial, Figures& figures);         // calls.cpp
void exchange_messages(const Trial& trial, Figures& figures);  // messages.cpp
void sum_up(const Trial& trial, Figures& figures);             // kernels.cpp
void run_kernels(const Trial& trial, Figures& figures);        // kernels.cpp
void ring_doorbells(const Trial& trial, Figures& figures);     // kernels.cpp

}  // namespace harness
