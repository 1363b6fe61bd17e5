#include "access.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>

#include "../device/abi.h"
#include "memory.h"
#include "report.h"

namespace cusim {

namespace {

constexpr uintptr_t kPageBytes = 4096;
constexpr int kWords = kPageBytes / 64;

struct Page {
  uint64_t read[kWords];
  uint64_t written[kWords];
};

class Recorder {
 public:
  bool on = false;

  void add(uintptr_t address, unsigned size, bool write) {
    if (!on) return;
    if (views_.in_worker_view(address)) address += views_.device - views_.worker;
    else if (!views_.in_device_view(address) && !maybe_registered(address)) return;
    while (size) {  // once, unless the access crosses a page or 64 bytes
      unsigned bit = address % 64, bits = size < 64 - bit ? size : 64 - bit;
      uint64_t mask = (bits == 64 ? ~0ull : (1ull << bits) - 1) << bit;
      Page *page = find(address / kPageBytes);
      (write ? page->written : page->read)[address % kPageBytes / 64] |= mask;
      address += bits;
      size -= bits;
    }
  }

  std::map<uintptr_t, std::unique_ptr<Page>> take() {
    memset(cache_, 0, sizeof cache_);
    return std::move(pages_);
  }

 private:
  Page *find(uintptr_t number) {
    auto &slot = cache_[number % kCached];
    if (slot.page && slot.number == number) return slot.page;
    auto &page = pages_[number];
    if (!page) page.reset(new Page{});
    slot = {number, page.get()};
    return page.get();
  }

  static constexpr int kCached = 64;
  struct Slot {
    uintptr_t number;
    Page *page;
  };
  const Views views_ = views();
  Slot cache_[kCached] = {};
  std::map<uintptr_t, std::unique_ptr<Page>> pages_;
};

// Reached through a plain pointer, as a thread_local with a constructor is checked on every access. Kept for good.
thread_local Recorder *recorder = nullptr;

inline void keep(void *pointer, unsigned size, bool write) {
  if (recorder) recorder->add((uintptr_t)pointer, size, write);
}

// Turns bits into ranges, joining those that touch.
class Ranges {
 public:
  Ranges(bool write, std::vector<Access> *out) : write_(write), out_(out) {}
  void add_word(uintptr_t base, uint64_t bits) {
    while (bits) {
      int from = __builtin_ctzll(bits);
      uint64_t rest = ~(bits >> from);
      int length = rest ? __builtin_ctzll(rest) : 64 - from;
      add(base + from, base + from + length);
      if (from + length >= 64) return;
      bits &= ~0ull << (from + length);
    }
  }
  void flush() {
    if (open_.end) out_->push_back({open_.first, open_.end, write_, false});
    open_ = {};
  }

 private:
  void add(uintptr_t first, uintptr_t end) {
    if (open_.end == first && open_.end) {
      open_.end = end;
      return;
    }
    flush();
    open_ = {first, end, write_, false};
  }
  bool write_;
  std::vector<Access> *out_;
  Access open_{};
};

// Keeps what lies in allocations; of device memory outside them, reports the first of each kind of access.
bool clip(const std::string &operation, const std::vector<Access> &found, std::vector<Access> *out) {
  bool outside = false;
  for (const Access &access : found) {
    for (uintptr_t at = access.first; at < access.end;) {
      Allocation allocation;
      if (find_allocation((void *)at, &allocation)) {
        uintptr_t end = std::min(access.end, allocation.base + allocation.size);
        out->push_back({at, end, access.write, false});
        at = end;
      } else if (in_device_memory(at)) {
        report("bounds", operation + (access.write ? " writes " : " reads ") + describe_address(at, access.end - at));
        outside = true;
        break;
      } else {
        break;  // a kernel's own stack or a module's data between two registered ranges
      }
    }
  }
  return outside;
}

}  // namespace

void begin_accesses() {
  if (!recorder) recorder = new Recorder;
  recorder->on = true;
}

bool end_accesses(const std::string &operation, std::vector<Access> *out) {
  recorder->on = false;
  std::vector<Access> found;
  auto pages = recorder->take();
  for (bool write : {false, true}) {
    Ranges ranges(write, &found);
    for (auto &[number, page] : pages)
      for (int word = 0; word < kWords; word++)
        ranges.add_word(number * kPageBytes + word * 64, (write ? page->written : page->read)[word]);
    ranges.flush();
  }
  return clip(operation, found, out);
}

}  // namespace cusim

// What -fsanitize=thread calls.
#define CUSIM_ACCESS(size)                                                                              \
  extern "C" void __tsan_read##size(void *p) { cusim::keep(p, size, false); }           \
  extern "C" void __tsan_write##size(void *p) { cusim::keep(p, size, true); }           \
  extern "C" void __tsan_unaligned_read##size(void *p) { cusim::keep(p, size, false); } \
  extern "C" void __tsan_unaligned_write##size(void *p) { cusim::keep(p, size, true); }
CUSIM_ACCESS(1)
CUSIM_ACCESS(2)
CUSIM_ACCESS(4)
CUSIM_ACCESS(8)
CUSIM_ACCESS(16)
extern "C" void __tsan_read_range(void *p, unsigned long size) { cusim::keep(p, (unsigned)size, false); }
extern "C" void __tsan_write_range(void *p, unsigned long size) { cusim::keep(p, (unsigned)size, true); }
extern "C" void __tsan_vptr_update(void **, void *) {}
extern "C" void __tsan_vptr_read(void **) {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

extern "C" void cusim_atomic_access(void *pointer, unsigned size) {
  cusim::keep(pointer, size, true);
}
