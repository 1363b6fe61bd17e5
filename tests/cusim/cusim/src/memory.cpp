#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"
#include "race.h"
#include "report.h"
#include "settings.h"
#include "status.h"

namespace cusim {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAddressesPerByte = 8;  // address space per byte of device memory: freed addresses come back late
constexpr size_t kRememberedFrees = 1024;

size_t pages(size_t size) { return (size + kPage - 1) & ~(kPage - 1); }

struct Arena : Views {  // of all devices' memory
  int file = -1;

  Arena() {
    size = pages(settings().device_bytes) * kAddressesPerByte * settings().devices;
    file = memfd_create("cusim device memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size)) fail("a file in memory");
    void *workers = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (workers == MAP_FAILED) fail("the worker view");
    void *programs = settings().guard
                       ? mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                       : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (programs == MAP_FAILED) fail("the device view");
    device = (uintptr_t)programs;
    worker = (uintptr_t)workers;
  }

  [[noreturn]] void fail(const char *what) const {
    fprintf(stderr, "cusim: cannot map %s of %zu bytes of address space. Lower CUSIM_MEM_MB or CUSIM_DEVICES.\n", what, size);
    abort();
  }
};

struct Table {
  std::mutex mutex;
  std::map<uintptr_t, Allocation> live;  // by base
  std::deque<Allocation> freed;          // newest first
  std::vector<uintptr_t> cursor;         // per device: where the search for free addresses goes on
  uint64_t serial = 0;
  size_t pinned = 0;
  std::atomic<uintptr_t> lowest{UINTPTR_MAX}, highest{0};  // of everything outside the arena
};

const Arena &arena() {
  static const Arena *mapped = new Arena;
  return *mapped;
}

Table &table() {
  static Table *kept = [] {
    auto *fresh = new Table;
    size_t share = arena().size / settings().devices;
    for (int i = 0; i < settings().devices; i++) fresh->cursor.push_back(arena().device + i * share);
    return fresh;
  }();
  return *kept;
}

// Next fit, so that an address comes back as late as possible. Every allocation is followed by an empty page.
uintptr_t find_addresses(Table &t, int device, size_t length) {
  size_t share = arena().size / settings().devices;
  uintptr_t first = arena().device + device * share, end = first + share;
  for (int lap = 0; lap < 2; lap++) {
    uintptr_t at = lap == 0 ? t.cursor[device] : first;
    for (auto next = t.live.lower_bound(at); at + length + kPage <= end; ++next) {
      uintptr_t limit = next == t.live.end() || next->first >= end ? end : next->first;
      if (at + length + kPage <= limit) {
        t.cursor[device] = at + length + kPage;
        return at;
      }
      if (limit == end) break;
      at = next->first + pages(next->second.size) + kPage;
    }
  }
  return 0;
}

void add(Table &t, const Allocation &allocation) {
  t.live[allocation.base] = allocation;
  if (arena().in_device_view(allocation.base)) return;
  t.lowest = std::min(t.lowest.load(), allocation.base);
  t.highest = std::max(t.highest.load(), allocation.base + allocation.size);
}

void remove(Table &t, const Allocation &allocation) {
  t.live.erase(allocation.base);
  t.freed.push_front(allocation);
  if (t.freed.size() > kRememberedFrees) t.freed.pop_back();
}

const Allocation *below(const Table &t, uintptr_t address) {
  auto next = t.live.upper_bound(address);
  return next == t.live.begin() ? nullptr : &std::prev(next)->second;
}

}  // namespace

void poison(void *pointer, size_t size) {
  if (settings().poison >= 0) memset(pointer, settings().poison, size);
}

int allocate(size_t size, Kind kind, int device, void **out) {
  *out = nullptr;
  if (!size) return kSuccess;
  size_t length = pages(size);
  if (length < size) return kOutOfMemory;
  Table &t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  uintptr_t base = 0;
  if (kind == Kind::kDevice) {
    if (!reserve_bytes(device, length)) return kOutOfMemory;
    base = find_addresses(t, device, length);
    if (!base) {
      return_bytes(device, length);
      return kOutOfMemory;
    }
    poison(worker_view((void *)base), length);
  } else {
    if (kind == Kind::kPinned && settings().pinned_bytes && t.pinned + length > settings().pinned_bytes) return kOutOfMemory;
    if (kind == Kind::kManaged && !reserve_bytes(device, length)) return kOutOfMemory;
    void *fresh = mmap(nullptr, length + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) return kOutOfMemory;
    mprotect((char *)fresh + length, kPage, PROT_NONE);
    poison(fresh, length);
    base = (uintptr_t)fresh;
    if (kind == Kind::kPinned) t.pinned += length;
  }
  add(t, {base, size, kind, device, true, ++t.serial});
  *out = (void *)base;
  return kSuccess;
}

int release(void *pointer, bool pinned) {
  if (!pointer) return kSuccess;
  Table &t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto found = t.live.find((uintptr_t)pointer);
  if (found == t.live.end() || !found->second.owned) return kInvalidValue;
  Allocation gone = found->second;
  if (pinned != (gone.kind == Kind::kPinned)) return kInvalidValue;
  size_t length = pages(gone.size);
  remove(t, gone);
  forget_accesses(gone.base, length);
  if (gone.kind == Kind::kDevice) {
    fallocate(arena().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(gone.base - arena().device), (off_t)length);
  } else {
    munmap((void *)gone.base, length + kPage);
  }
  if (gone.kind == Kind::kPinned) t.pinned -= length;
  else return_bytes(gone.device, length);
  return kSuccess;
}

int register_memory(void *pointer, size_t size, Kind kind) {
  if (!pointer || !size) return kInvalidValue;
  Table &t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  uintptr_t base = (uintptr_t)pointer;
  const Allocation *last = below(t, base + size - 1);
  if (last && last->base + last->size > base) return kHostMemoryAlreadyRegistered;
  if (kind == Kind::kPinned) {
    if (settings().pinned_bytes && t.pinned + pages(size) > settings().pinned_bytes) return kOutOfMemory;
    t.pinned += pages(size);
  }
  add(t, {base, size, kind, current_device(), false, ++t.serial});
  return kSuccess;
}

int unregister_memory(void *pointer) {
  Table &t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto found = t.live.find((uintptr_t)pointer);
  if (found == t.live.end() || found->second.owned) return kHostMemoryNotRegistered;
  Allocation gone = found->second;
  if (gone.kind == Kind::kPinned) t.pinned -= pages(gone.size);
  forget_accesses(gone.base, gone.size);
  remove(t, gone);
  return kSuccess;
}

bool find_allocation(const void *pointer, Allocation *out) {
  Table &t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  const Allocation *found = below(t, (uintptr_t)pointer);
  if (!found || (uintptr_t)pointer >= found->base + found->size) return false;
  *out = *found;
  return true;
}

std::string describe(const Allocation &a) {
  static const char *const kKinds[] = {"pageable", "pinned", "device", "managed"};
  std::string where = a.kind == Kind::kDevice ? text(" on device %d", a.device) : "";
  return text("allocation %lu (%s%s, %zu bytes at %#lx)", (unsigned long)a.serial, kKinds[(int)a.kind], where.c_str(), a.size,
              (unsigned long)a.base);
}

std::string describe_address(uintptr_t address, size_t size) {
  Table &t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  std::string range = text("%zu byte%s at %#lx", size, size == 1 ? "" : "s", (unsigned long)address);
  for (const Allocation &gone : t.freed)
    if (address >= gone.base && address < gone.base + pages(gone.size))
      return range + ", " + text("%lu bytes into the freed ", (unsigned long)(address - gone.base)) + describe(gone);
  const Allocation *nearest = below(t, address);
  if (!nearest) return range + ", below every allocation";
  size_t offset = address - nearest->base;
  if (offset < nearest->size) return range + ", " + text("%zu bytes into ", offset) + describe(*nearest);
  return range + ", " + text("%zu bytes past the end of ", offset - nearest->size) + describe(*nearest);
}

bool within_bounds(const void *pointer, size_t size, const char *operation, Kind *kind) {
  Allocation found;
  uintptr_t first = (uintptr_t)pointer;
  if (find_allocation(pointer, &found)) {
    *kind = found.kind;
    if (first + size <= found.base + found.size) return true;
    size_t excess = first + size - (found.base + found.size);
    report("bounds", text("%s of %zu bytes goes %zu bytes past the end of ", operation, size, excess) + describe(found));
    return false;
  }
  *kind = Kind::kPageable;
  if (!in_device_memory(first)) return true;
  report("bounds", text("%s outside any allocation: ", operation) + describe_address(first, size));
  return false;
}

const Views &views() { return arena(); }

void *worker_view(const void *pointer) {
  const Views &v = views();
  uintptr_t address = (uintptr_t)pointer;
  return (void *)(v.in_device_view(address) ? address - v.device + v.worker : address);
}

uintptr_t device_address(uintptr_t address) {
  const Views &v = views();
  return v.in_worker_view(address) ? address - v.worker + v.device : address;
}

bool in_device_memory(uintptr_t address) { return views().in_device_view(address) || views().in_worker_view(address); }

Bounds registered_bounds() { return {table().lowest, table().highest}; }

}  // namespace cusim
