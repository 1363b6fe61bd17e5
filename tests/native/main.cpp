// The native code that ranks share memory through, run by threads of one process under a sanitizer: no Python in it.
//
//   harness FIRST_SEED LAST_SEED ROUNDS [FAULT]     for 2, 3, 4 and 8 ranks each
//
// It prints what was done, `name=count` each, and exits with 0 if all was as expected; a sanitizer has its own exit code.
// Built and run by sanitize.py. A FAULT (counter, parting, overflow, undefined) is one that the sanitizer must find.
//
// Limits. ThreadSanitizer sees atomic operations and plain accesses, not what the kernel does: the futex is a mere pause to it, so
// every order that is relied on has to come from an atomic operation, and that is what is checked here. The kernel's copies of
// another process's memory are made visible in calls.cpp, stores past the caches by -DZERORT_PLAIN_STORES (ThreadSanitizer only).
#include "harness.h"

namespace {

using namespace harness;

Fault fault_named(const std::string& name) {
  const std::map<std::string, Fault> faults = {{"counter", Fault::counter},
                                               {"parting", Fault::parting},
                                               {"overflow", Fault::overflow},
                                               {"undefined", Fault::undefined}};
  return faults.at(name);
}

int plain_counter = 0;

// The faults that need no part of the module.
void commit(Fault fault) {
  if (fault == Fault::counter)
    on_ranks(2, [](int) { plain_counter++; });
  if (fault == Fault::undefined) {
    volatile int large = 0x7fffffff;
    large = large + 1;
  }
}

}  // namespace

int main(int count, char** words) {
  if (count < 4) {
    std::fprintf(stderr, "Expected FIRST_SEED LAST_SEED ROUNDS [FAULT], got %d arguments.\n", count - 1);
    return 64;
  }
  const std::uint64_t first = std::strtoull(words[1], nullptr, 10), last = std::strtoull(words[2], nullptr, 10);
  const int rounds = std::atoi(words[3]);
  const Fault fault = count > 4 ? fault_named(words[4]) : Fault::none;
  commit(fault);
  Figures figures;
  check_account_of_yields(figures);
  for (std::uint64_t seed = first; seed <= last; seed++) {
    for (const int size : {2, 3, 4, 8}) {
      const Trial trial = {size, seed, rounds, fault};
      sum_up(trial, figures);
      meet_often(trial, figures);
      break_meetings(trial, figures);
      call_prepared(trial, figures);
      read_peers(trial, figures);
      ring_doorbells(trial, figures);
      exchange_messages({size, seed, rounds / 8 + 1, fault}, figures);
    }
    run_kernels({1, seed, rounds, fault}, figures);
  }
  for (const auto& [name, value] : figures) std::printf("%s=%llu\n", name.c_str(), static_cast<unsigned long long>(value));
  return 0;
}
