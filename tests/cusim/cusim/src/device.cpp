#include "device.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "settings.h"
#include "status.h"

namespace cusim {

namespace {
std::mutex used_mutex;
std::vector<size_t> &used() {
  static auto *bytes = new std::vector<size_t>(settings().devices);
  return *bytes;
}
thread_local int this_device = 0;
thread_local bool context_made = false;
std::atomic<int> current_fault{kSuccess};
}  // namespace

int device_count() { return settings().devices; }
bool is_device(int device) { return device >= 0 && device < device_count(); }
int current_device() { return this_device; }
void use_device(int device) { this_device = device; }
bool has_context() { return context_made; }
void make_context(bool made) { context_made = made; }
void set_fault(int status) { current_fault = status; }
int fault() { return current_fault; }

bool reserve_bytes(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(used_mutex);
  if (bytes > settings().device_bytes - used()[device]) return false;
  used()[device] += bytes;
  return true;
}

void return_bytes(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(used_mutex);
  used()[device] -= bytes;
}

size_t free_bytes(int device) {
  std::lock_guard<std::mutex> lock(used_mutex);
  return settings().device_bytes - used()[device];
}

int attribute(int attribute, int device) {
  switch (attribute) {
    case 1: return 1024;         // max threads per block
    case 2: case 3: return 1024; // max block dimensions
    case 4: return 64;
    case 5: return 2147483647;   // max grid dimensions
    case 6: case 7: return 65535;
    case 8: return 49152;        // shared memory per block
    case 9: return 65536;        // constant memory
    case 10: return 32;          // warp size
    case 11: return 2147483647;  // max pitch
    case 12: return 65536;       // registers per block
    case 13: return 1410000;     // clock rate, kHz
    case 14: return 512;         // texture alignment
    case 15: return 1;           // copies overlap with kernels
    case 16: return 4;           // multiprocessors
    case 19: return 1;           // can map host memory
    case 31: return 1;           // concurrent kernels
    case 33: return 1 + device;  // PCI bus
    case 36: return 1215000;     // memory clock, kHz
    case 37: return 5120;        // memory bus width
    case 38: return 4 << 20;     // L2 cache
    case 39: return 2048;        // threads per multiprocessor
    case 40: return 2;           // copy engines
    case 41: return 1;           // unified addresses
    case 51: return 32;          // texture pitch alignment
    case 75: return 8;           // compute capability
    case 76: return 0;
    case 78: return 1;           // stream priorities
    case 81: return 167936;      // shared memory per multiprocessor
    case 82: return 65536;       // registers per multiprocessor
    case 83: return 1;           // managed memory
    case 97: return 166912;      // shared memory per block, opted in
    case 106: return 32;         // blocks per multiprocessor
    case 115: return 1;          // memory pools
    default: return 0;
  }
}

}  // namespace cusim

extern "C" void cusim_forget_fault() { cusim::set_fault(cusim::kSuccess); }
