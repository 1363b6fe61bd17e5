#include "memory.h"

#include <cstdint>
#include <cstring>

namespace zerort {

void touch(void* data, std::size_t nbytes) {
  constexpr std::uintptr_t page = 4096;  // the smallest in use; larger pages are merely touched more than once
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  for (std::uintptr_t address = begin; address < begin + nbytes; address = (address / page + 1) * page) {
    // Compare-and-swap of a byte with itself: a plain read and write back could undo what another rank stored between
    // them in a shared window, and compilers may turn an atomic "or 0" into a mere read.
    auto* byte = reinterpret_cast<unsigned char*>(address);
    unsigned char value = __atomic_load_n(byte, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(byte, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
}

// Sanitizers do not see such stores: -DZERORT_PLAIN_STORES does without.
#if defined(__x86_64__) && defined(__SSE2__) && !defined(ZERORT_PLAIN_STORES)

// The one store for which C++ has no words; SSE2 is part of every x86-64. glibc's memcpy streams too, but only from sizes of
// three quarters of the last cache on, which on servers is hundreds of megabytes.
void stream_bytes(void* to, const void* from, std::size_t nbytes) {
  using Lane = long long __attribute__((vector_size(16)));
  constexpr std::size_t line = 64, ahead = 1024;
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % line;
  if (nbytes < head + line) {
    std::memcpy(target, source, nbytes);
    return;
  }
  std::memcpy(target, source, head);
  std::size_t done = head;
  for (; done + line <= nbytes; done += line) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(source + done) + ahead));
    Lane lanes[4];
    std::memcpy(lanes, source + done, line);
    auto* place = reinterpret_cast<Lane*>(target + done);
    for (int k = 0; k < 4; ++k) __builtin_ia32_movntdq(place + k, lanes[k]);
  }
  std::memcpy(target + done, source + done, nbytes - done);
}

void finish_streaming() { __builtin_ia32_sfence(); }

#else

void stream_bytes(void* to, const void* from, std::size_t nbytes) { std::memcpy(to, from, nbytes); }

void finish_streaming() {}

#endif

void copy_bytes(void* to, const void* from, std::size_t nbytes) {
  const auto a = reinterpret_cast<std::uintptr_t>(to), b = reinterpret_cast<std::uintptr_t>(from);
  if (nbytes < stream_from || (a < b + nbytes && b < a + nbytes)) {
    std::memmove(to, from, nbytes);
    return;
  }
  stream_bytes(to, from, nbytes);
  finish_streaming();
}

}  // namespace zerort
