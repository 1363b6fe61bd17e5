// Memory: what is allocated where, its bounds, its poison, and the two views of device memory.
//
// Device memory lives in one file in memory, mapped twice. Programs get addresses of the *device view*, which no thread may
// touch (PROT_NONE), so a host read of device memory ends in a fault that names it. Stream workers use the *worker view*
// of the same bytes, `worker_view(pointer)`. Pinned and managed memory has one view, for both.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace cusim {

enum class Kind { kPageable = 0, kPinned = 1, kDevice = 2, kManaged = 3 };  // the numbers of cudaMemoryType

struct Allocation {
  uintptr_t base = 0;
  size_t size = 0;
  Kind kind = Kind::kPageable;
  int device = 0;
  bool owned = true;    // false: registered host memory, a variable of a module
  uint64_t serial = 0;  // "allocation 12"
};

// Both return a status; `*out` is null for size 0, as in CUDA.
int allocate(size_t size, Kind kind, int device, void **out);
int release(void *pointer, bool pinned);

int register_memory(void *pointer, size_t size, Kind kind);
int unregister_memory(void *pointer);

// Overwrites bytes, given in the worker view, with CUSIM_POISON.
void poison(void *pointer, size_t size);

bool find_allocation(const void *pointer, Allocation *out);
// The allocation that was freed most recently at this address, or the one that ends nearest below it; for reports.
std::string describe_address(uintptr_t address, size_t size);
std::string describe(const Allocation &allocation);

// Whether [pointer, pointer + size) lies in one allocation or in none at all; reports the offender otherwise.
bool within_bounds(const void *pointer, size_t size, const char *operation, Kind *kind);

// Where the two views lie. Plain numbers, as every load and store of a kernel asks.
struct Views {
  uintptr_t device = 0, worker = 0;
  size_t size = 0;
  bool in_device_view(uintptr_t address) const { return address - device < size; }
  bool in_worker_view(uintptr_t address) const { return address - worker < size; }
};
const Views &views();

void *worker_view(const void *pointer);
uintptr_t device_address(uintptr_t address);  // of either view
bool in_device_memory(uintptr_t address);     // an address of either view, allocated or not

// Round all pinned, managed and registered memory there has been: a quick "no" for accesses to a kernel's own stack.
struct Bounds {
  uintptr_t first = UINTPTR_MAX, end = 0;
  bool has(uintptr_t address) const { return address >= first && address < end; }
};
Bounds registered_bounds();

}  // namespace cusim
