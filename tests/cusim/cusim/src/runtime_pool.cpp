// The CUDA runtime API: stream-ordered memory. Each device has its default pool, which keeps nothing back.
#include <map>
#include <mutex>
#include <utility>

#include "device.h"
#include "memory.h"
#include "runtime_api.h"
#include "status.h"
#include "stream.h"

using namespace cusim;

namespace {

std::mutex pools_mutex;
std::map<int, size_t> used_bytes;                                       // by device
std::map<std::pair<int, cudaMemPoolAttr>, uint64_t> pool_attributes;  // as they were set

cudaMemPool_t default_pool(int device) { return (cudaMemPool_t)(uintptr_t)(0x1000 + device); }
int device_of(cudaMemPool_t pool) { return (int)((uintptr_t)pool - 0x1000); }

void add_bytes(int device, size_t added) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  used_bytes[device] += added;
}

}  // namespace

// Other streams may use it only after what gives it, and not beside what takes it back: both count as writes.
API cudaMallocAsync(void **out, size_t size, cudaStream_t handle) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  int status = allocate(size, Kind::kDevice, stream->device, out);
  if (status != kSuccess || !*out) return answer(status);
  add_bytes(stream->device, size);
  submit(stream, "cudaMallocAsync", {writes(*out, size)}, [](Operation &) {});
  return answer(kSuccess);
}
API cudaMallocFromPoolAsync(void **out, size_t size, cudaMemPool_t, cudaStream_t stream) { return cudaMallocAsync(out, size, stream); }
API cudaFreeAsync(void *pointer, cudaStream_t handle) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  Allocation found;
  if (!pointer) return answer(kSuccess);
  if (!find_allocation(pointer, &found) || found.base != (uintptr_t)pointer) return answer(kInvalidValue);
  submit(stream, "cudaFreeAsync", {writes(pointer, found.size)}, [](Operation &) {});  // the check sees it before it goes
  submit(stream, "cudaFreeAsync", {}, [=](Operation &) { release(pointer, false); });
  add_bytes(found.device, -found.size);
  return answer(kSuccess);
}

API cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  if (!is_device(device)) return answer(kInvalidDevice);
  return *pool = default_pool(device), answer(kSuccess);
}
API cudaDeviceGetMemPool(cudaMemPool_t *pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
API cudaDeviceSetMemPool(int device, cudaMemPool_t pool) { return answer(pool == default_pool(device) ? kSuccess : kNotSupported); }
API cudaMemPoolTrimTo(cudaMemPool_t pool, size_t) {
  synchronize_device(device_of(pool));
  return answer(kSuccess);
}
API cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void *value) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  pool_attributes[{device_of(pool), which}] = *(uint64_t *)value;
  return answer(kSuccess);
}
API cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void *value) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  bool bytes = which == cudaMemPoolAttrUsedMemCurrent || which == cudaMemPoolAttrReservedMemCurrent;
  *(uint64_t *)value = bytes ? used_bytes[device_of(pool)] : pool_attributes[{device_of(pool), which}];
  return answer(kSuccess);
}
