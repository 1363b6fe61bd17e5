// The CUDA runtime API: memory and copies.
#include <cstring>

#include "capture.h"
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
  if (int forbidden = check_captures()) return answer(forbidden);
  make_context(true);
  watch_faults();
  return answer(allocate(size, kind, current_device(), out));
}

API cudaMalloc(void **out, size_t size) { return new_memory(out, size, Kind::kDevice); }
API cudaMallocManaged(void **out, size_t size, unsigned) { return new_memory(out, size, Kind::kManaged); }
API cudaHostAlloc(void **out, size_t size, unsigned) { return new_memory(out, size, Kind::kPinned); }
API cudaMallocHost(void **out, size_t size) { return new_memory(out, size, Kind::kPinned); }

API cudaFree(void *pointer) {
  if (int forbidden = check_captures()) return answer(forbidden);
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

// Hints about managed memory: checked, and without effect.
static cudaError_t hint(bool known, int device) {
  return answer(!known ? kInvalidValue : device == -1 || is_device(device) ? kSuccess : kInvalidDevice);
}
static bool is_advice(int advice) { return advice >= cudaMemAdviseSetReadMostly && advice <= cudaMemAdviseUnsetAccessedBy; }
#if CUDART_VERSION >= 13000
API cudaMemPrefetchAsync(const void *, size_t, cudaMemLocation where, unsigned, cudaStream_t) { return hint(true, where.id); }
API cudaMemAdvise(const void *, size_t, cudaMemoryAdvise advice, cudaMemLocation where) { return hint(is_advice(advice), where.id); }
#else
API cudaMemPrefetchAsync(const void *, size_t, int device, cudaStream_t) { return hint(true, device); }
API cudaMemAdvise(const void *, size_t, cudaMemoryAdvise advice, int device) { return hint(is_advice(advice), device); }
#endif
