// The CUDA runtime API: memory, copies, and the default memory pools.
#include <cstring>

#include "copy.h"
#include "device.h"
#include "fault.h"
#include "memory.h"
#include "runtime_api.h"
#include "settings.h"
#include "status.h"
#include "stream.h"

using namespace cusim;

static cudaError_t new_memory(void **out, size_t size, Kind kind) {
  make_context(true);
  watch_faults();
  return answer(allocate(size, kind, current_device(), out));
}

API cudaMalloc(void **out, size_t size) { return new_memory(out, size, Kind::kDevice); }
API cudaMallocManaged(void **out, size_t size, unsigned) { return new_memory(out, size, Kind::kManaged); }
API cudaHostAlloc(void **out, size_t size, unsigned) { return new_memory(out, size, Kind::kPinned); }
API cudaMallocHost(void **out, size_t size) { return new_memory(out, size, Kind::kPinned); }

API cudaFree(void *pointer) {
  make_context(true);
  if (pointer) synchronize_all();  // as the real one does
  return answer(release(pointer, false));
}

// Host memory that streams still use must not go: the real call may wait for them, and may not.
static void host_memory_ends(const char *call, void *pointer) {
  Allocation found;
  if (find_allocation(pointer, &found)) record_host_access(call, writes((void *)found.base, found.size));
}
API cudaFreeHost(void *pointer) {
  host_memory_ends("cudaFreeHost", pointer);
  synchronize_all();
  return answer(release(pointer, true));
}
API cudaHostRegister(void *pointer, size_t size, unsigned) {
  watch_faults();
  return answer(register_memory(pointer, size, Kind::kPinned));
}
API cudaHostUnregister(void *pointer) {
  host_memory_ends("cudaHostUnregister", pointer);
  synchronize_all();
  return answer(unregister_memory(pointer));
}
API cudaHostGetDevicePointer(void **device, void *host, unsigned) { return *device = host, answer(kSuccess); }

// Stream-ordered memory: other streams may use it only after what gives it, and not beside what takes it back.
API cudaMallocAsync(void **out, size_t size, cudaStream_t handle) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  cudaError_t status = new_memory(out, size, Kind::kDevice);
  if (status == cudaSuccess && *out) submit(stream, "cudaMallocAsync", {writes(*out, size)}, [](Operation &) {});
  return status;
}
API cudaMallocFromPoolAsync(void **out, size_t size, cudaMemPool_t, cudaStream_t stream) { return cudaMallocAsync(out, size, stream); }
API cudaFreeAsync(void *pointer, cudaStream_t handle) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  Allocation found;
  if (!pointer) return answer(kSuccess);
  if (!find_allocation(pointer, &found) || found.base != (uintptr_t)pointer) return answer(kInvalidValue);
  submit(stream, "cudaFreeAsync", {writes(pointer, found.size)}, [](Operation &) {});  // the check sees it before it goes
  submit(stream, "cudaFreeAsync", {}, [pointer](Operation &) { release(pointer, false); });
  return answer(kSuccess);
}

API cudaMemGetInfo(size_t *free, size_t *total) {
  *free = free_bytes(current_device());
  *total = settings().device_bytes;
  return answer(kSuccess);
}
API cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  Allocation found;
  if (!find_allocation(pointer, &found)) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;  // cudaInvalidDeviceId
    attributes->hostPointer = (void *)pointer;
    return answer(kSuccess);
  }
  attributes->type = (cudaMemoryType)found.kind;
  attributes->device = found.device;
  attributes->devicePointer = (void *)pointer;
  attributes->hostPointer = found.kind == Kind::kDevice ? nullptr : (void *)pointer;
  return answer(kSuccess);
}

API cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) { return answer(copy(to, from, size, nullptr, false)); }
API cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return answer(copy(to, from, size, stream, true));
}
API cudaMemcpyPeer(void *to, int, const void *from, int, size_t size) { return answer(copy(to, from, size, nullptr, false)); }
API cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream) {
  return answer(copy(to, from, size, stream, true));
}
API cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind) {
  return answer(copy_rows(to, from, {width, height, to_pitch, from_pitch}, nullptr, false));
}
API cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind,
                      cudaStream_t stream) {
  return answer(copy_rows(to, from, {width, height, to_pitch, from_pitch}, stream, true));
}
API cudaMemset(void *to, int value, size_t size) { return answer(fill(to, value, size, nullptr)); }
API cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { return answer(fill(to, value, size, stream)); }

#if CUDART_VERSION >= 13000
API cudaMemPrefetchAsync(const void *, size_t, cudaMemLocation, unsigned, cudaStream_t) { return answer(kSuccess); }
API cudaMemAdvise(const void *, size_t, cudaMemoryAdvise, cudaMemLocation) { return answer(kSuccess); }
#else
API cudaMemPrefetchAsync(const void *, size_t, int, cudaStream_t) { return answer(kSuccess); }
API cudaMemAdvise(const void *, size_t, cudaMemoryAdvise, int) { return answer(kSuccess); }
#endif

// A device has its default pool, which keeps nothing back.
API cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  if (!is_device(device)) return answer(kInvalidDevice);
  return *pool = (cudaMemPool_t)(uintptr_t)(0x1000 + device), answer(kSuccess);
}
API cudaDeviceGetMemPool(cudaMemPool_t *pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
API cudaDeviceSetMemPool(int, cudaMemPool_t) { return answer(kSuccess); }
API cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return answer(kSuccess); }
API cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return answer(kSuccess); }
API cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr which, void *value) {
  bool used = which == cudaMemPoolAttrUsedMemCurrent || which == cudaMemPoolAttrReservedMemCurrent;
  int device = (int)((uintptr_t)pool - 0x1000);
  *(uint64_t *)value = used && is_device(device) ? settings().device_bytes - free_bytes(device) : 0;
  return answer(kSuccess);
}
