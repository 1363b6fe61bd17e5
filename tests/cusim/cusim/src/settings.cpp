#include "settings.h"

#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace cusim {

static long number(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtol(text, nullptr, 0) : otherwise;
}

static std::string word(const char *name, const char *otherwise) {
  const char *text = getenv(name);
  return text && *text ? text : otherwise;
}

const Settings &settings() {
  static const Settings *read = new Settings{
      (int)number("CUSIM_DEVICES", 2),
      (size_t)number("CUSIM_MEM_MB", 2048) << 20,
      (size_t)number("CUSIM_PINNED_MB", 0) << 20,
      (uint64_t)number("CUSIM_SEED", 0),
      (unsigned)number("CUSIM_DELAY_US", 2000),
      (int)number("CUSIM_POISON", 0xFF),
      number("CUSIM_GUARD", 1) != 0,
      number("CUSIM_RACES", 1) != 0,
      number("CUSIM_TRACE", 0) != 0,
      number("CUSIM_KEEP", 0) != 0,
      (double)number("CUSIM_NCCL_TIMEOUT", 120),
      (int)number("CUSIM_NCCL_VERSION", 22703),
      (int)number("CUSIM_NCCL_COMMUNICATORS", 0),
      word("CUSIM_REPORT", ""),
      word("CUSIM_DEVICE_HEADERS", ""),
      word("CUSIM_CXX", "g++"),
      word("CUSIM_CXXFLAGS", "-O1"),
  };
  return *read;
}

static std::atomic<uint64_t> &current_seed() {
  static std::atomic<uint64_t> current{settings().seed};
  return current;
}

uint64_t seed() { return current_seed().load(std::memory_order_relaxed); }

void trace(const char *format, ...) {
  if (!settings().trace) return;
  va_list arguments;
  va_start(arguments, format);
  char line[2048];
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  fprintf(stderr, "cusim[%d]: %s\n", (int)getpid(), line);
}

}  // namespace cusim

extern "C" void cusim_reseed(uint64_t seed) { cusim::current_seed().store(seed, std::memory_order_relaxed); }
