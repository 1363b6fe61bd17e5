// The CUDA runtime API: errors, versions, devices.
#include <cstdio>
#include <cstring>

#include "device.h"
#include "runtime_api.h"
#include "settings.h"
#include "status.h"
#include "stream.h"

using namespace cusim;

static thread_local int last_error = kSuccess;

cudaError_t cusim::answer(int status) {
  if (status != kSuccess && status != kNotReady) last_error = status;
  return (cudaError_t)status;
}

API cudaGetLastError() {
  int status = last_error;
  last_error = kSuccess;
  return (cudaError_t)status;
}
API cudaPeekAtLastError() { return (cudaError_t)last_error; }
extern "C" const char *cudaGetErrorString(cudaError_t status) { return status_text(status).meaning; }
extern "C" const char *cudaGetErrorName(cudaError_t status) { return status_text(status).runtime; }
API cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, answer(kSuccess); }
API cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, answer(kSuccess); }

API cudaGetDeviceCount(int *count) {
  *count = device_count();
  return answer(*count ? kSuccess : kNoDevice);
}
API cudaGetDevice(int *device) { return *device = current_device(), answer(kSuccess); }
API cudaSetDevice(int device) {
  if (!is_device(device)) return answer(kInvalidDevice);
  use_device(device);
  make_context(true);
  return answer(kSuccess);
}
API cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int device) {
  if (!is_device(device)) return answer(kInvalidDevice);
  return *value = attribute(which, device), answer(kSuccess);
}
API cudaDeviceSynchronize() {
  synchronize_device(current_device());
  return answer(fault());
}
API cudaDeviceGetPCIBusId(char *id, int room, int device) {
  if (!is_device(device)) return answer(kInvalidDevice);
  snprintf(id, room, "0000:%02X:00.0", device + 1);
  return answer(kSuccess);
}
API cudaDeviceGetByPCIBusId(int *device, const char *id) {
  unsigned domain, bus;
  if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || !is_device((int)bus - 1)) return answer(kInvalidValue);
  return *device = (int)bus - 1, answer(kSuccess);
}
API cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  if (!is_device(device) || !is_device(peer)) return answer(kInvalidDevice);
  return *can = device != peer, answer(kSuccess);
}
API cudaDeviceEnablePeerAccess(int peer, unsigned) { return answer(is_device(peer) ? kSuccess : kInvalidDevice); }
API cudaDeviceDisablePeerAccess(int peer) { return answer(is_device(peer) ? kSuccess : kInvalidDevice); }
API cudaDeviceGetLimit(size_t *value, cudaLimit) { return *value = 1 << 20, answer(kSuccess); }
API cudaDeviceSetLimit(cudaLimit, size_t) { return answer(kSuccess); }
API cudaProfilerStart() { return answer(kSuccess); }
API cudaProfilerStop() { return answer(kSuccess); }

#if CUDART_VERSION >= 13000
API cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
#else
API cudaGetDeviceProperties_v2(cudaDeviceProp *p, int device) {
#endif
  if (!is_device(device)) return answer(kInvalidDevice);
  memset(p, 0, sizeof *p);
  auto value = [=](cudaDeviceAttr which) { return attribute(which, device); };
  snprintf(p->name, sizeof p->name, "cusim emulated device %d", device);
  snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "cusim-device-%d", device);
  p->totalGlobalMem = settings().device_bytes;
  p->sharedMemPerBlock = value(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = value(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = value(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->regsPerBlock = value(cudaDevAttrMaxRegistersPerBlock);
  p->regsPerMultiprocessor = value(cudaDevAttrMaxRegistersPerMultiprocessor);
  p->warpSize = value(cudaDevAttrWarpSize);
  p->memPitch = value(cudaDevAttrMaxPitch);
  p->maxThreadsPerBlock = value(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = value(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->maxBlocksPerMultiProcessor = value(cudaDevAttrMaxBlocksPerMultiprocessor);
  p->maxThreadsDim[0] = value(cudaDevAttrMaxBlockDimX);
  p->maxThreadsDim[1] = value(cudaDevAttrMaxBlockDimY);
  p->maxThreadsDim[2] = value(cudaDevAttrMaxBlockDimZ);
  p->maxGridSize[0] = value(cudaDevAttrMaxGridDimX);
  p->maxGridSize[1] = value(cudaDevAttrMaxGridDimY);
  p->maxGridSize[2] = value(cudaDevAttrMaxGridDimZ);
  p->totalConstMem = value(cudaDevAttrTotalConstantMemory);
  p->textureAlignment = value(cudaDevAttrTextureAlignment);
  p->texturePitchAlignment = value(cudaDevAttrTexturePitchAlignment);
  p->major = value(cudaDevAttrComputeCapabilityMajor);
  p->minor = value(cudaDevAttrComputeCapabilityMinor);
  p->multiProcessorCount = value(cudaDevAttrMultiProcessorCount);
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->memoryPoolsSupported = 1;
  p->streamPrioritiesSupported = 1;
  p->pciBusID = value(cudaDevAttrPciBusId);
  p->asyncEngineCount = value(cudaDevAttrAsyncEngineCount);
  p->memoryBusWidth = value(cudaDevAttrGlobalMemoryBusWidth);
  p->l2CacheSize = value(cudaDevAttrL2CacheSize);
#if CUDART_VERSION < 13000
  p->clockRate = value(cudaDevAttrClockRate);
  p->memoryClockRate = value(cudaDevAttrMemoryClockRate);
#endif
  return answer(kSuccess);
}
