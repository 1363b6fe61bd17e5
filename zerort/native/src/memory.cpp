#include "memory.h"

#include <cstdint>

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

}  // namespace zerort
