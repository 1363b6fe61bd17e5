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
  // Before a kernel: what it has been given was registered by then.
  void begin() { registered_ = registered_bounds(); }

  // Every load and store of every kernel comes here: only what is usual stands in line.
  template <unsigned size, bool write>
  void add(uintptr_t address) {
    if (!find_in_device_view(&address)) return;
    unsigned bit = address % 64;
    const Slot &slot = cache_[address / kPageBytes % kCached];
    if (slot.number == address / kPageBytes && bit + size <= 64)
      word_of<write>(slot.page, address) |= ((1ull << size) - 1) << bit;
    else
      add_pieces<write>(address, size);
  }

  template <bool write>
  void add_range(uintptr_t address, unsigned long size) {
    if (find_in_device_view(&address)) add_pieces<write>(address, size);
  }

  std::map<uintptr_t, std::unique_ptr<Page>> take() {
    memset(cache_, 0, sizeof cache_);
    return std::move(pages_);
  }

 private:
  // False for what is of no interest: the kernel's own stack.
  bool find_in_device_view(uintptr_t *address) const {
    if (views_.in_worker_view(*address)) *address += views_.device - views_.worker;
    else if (!views_.in_device_view(*address) && !registered_.has(*address)) return false;
    return true;
  }

  template <bool write>
  [[gnu::noinline]] void add_pieces(uintptr_t address, unsigned long size) {
    while (size) {  // once, unless the access crosses a page or 64 bytes
      unsigned bit = address % 64;
      unsigned long bits = std::min(size, 64ul - bit);
      word_of<write>(find(address / kPageBytes), address) |= (bits == 64 ? ~0ull : (1ull << bits) - 1) << bit;
      address += bits;
      size -= bits;
    }
  }

  template <bool write>
  static uint64_t &word_of(Page *page, uintptr_t address) {
    return (write ? page->written : page->read)[address % kPageBytes / 64];
  }

  Page *find(uintptr_t number) {
    auto &slot = cache_[number % kCached];
    if (slot.number == number) return slot.page;
    auto &page = pages_[number];
    if (!page) page.reset(new Page{});
    slot = {number, page.get()};
    return page.get();
  }

  static constexpr int kCached = 64;
  struct Slot {
    uintptr_t number;  // 0: empty; no one has memory there
    Page *page;
  };
  const Views views_ = views();
  Bounds registered_;
  Slot cache_[kCached] = {};
  std::map<uintptr_t, std::unique_ptr<Page>> pages_;
};

// Of this thread while a kernel runs; reached through a plain pointer, as a thread_local with a constructor is checked on
// every access.
thread_local Recorder *recorder = nullptr;
thread_local Recorder *kept = nullptr;  // from one kernel to the next, for good

template <unsigned size, bool write>
inline void keep(void *pointer) {
  if (recorder) recorder->add<size, write>((uintptr_t)pointer);
}

template <bool write>
inline void keep_range(void *pointer, unsigned long size) {
  if (recorder) recorder->add_range<write>((uintptr_t)pointer, size);
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
  if (!kept) kept = new Recorder;
  kept->begin();
  recorder = kept;
}

bool end_accesses(const std::string &operation, std::vector<Access> *out) {
  recorder = nullptr;
  std::vector<Access> found;
  auto pages = kept->take();
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
#define CUSIM_ACCESS(size)                                                              \
  extern "C" void __tsan_read##size(void *p) { cusim::keep<size, false>(p); }           \
  extern "C" void __tsan_write##size(void *p) { cusim::keep<size, true>(p); }           \
  extern "C" void __tsan_unaligned_read##size(void *p) { cusim::keep<size, false>(p); } \
  extern "C" void __tsan_unaligned_write##size(void *p) { cusim::keep<size, true>(p); }
CUSIM_ACCESS(1)
CUSIM_ACCESS(2)
CUSIM_ACCESS(4)
CUSIM_ACCESS(8)
CUSIM_ACCESS(16)
extern "C" void __tsan_read_range(void *p, unsigned long size) { cusim::keep_range<false>(p, size); }
extern "C" void __tsan_write_range(void *p, unsigned long size) { cusim::keep_range<true>(p, size); }
extern "C" void __tsan_vptr_update(void **, void *) {}
extern "C" void __tsan_vptr_read(void **) {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

extern "C" void cusim_atomic_access(void *pointer, unsigned size) {
  cusim::keep_range<true>(pointer, size);
}
