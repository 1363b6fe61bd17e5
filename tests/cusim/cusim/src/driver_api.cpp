// The CUDA driver API, as far as CuPy asks for it: devices, contexts, modules, launches. CuPy finds it by dlsym.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "device.h"
#include "kernel.h"
#include "settings.h"
#include "status.h"
#include "stream.h"

using namespace cusim;

#define API extern "C" CUresult

static CUresult answer(int status) { return (CUresult)status; }

// A device's context is the address of its place in here; nothing is kept in a context.
static char contexts[64];
static CUcontext context_of(int device) { return (CUcontext)&contexts[device]; }

API cuInit(unsigned) { return CUDA_SUCCESS; }
API cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
API cuDeviceGetCount(int *count) { return *count = device_count(), CUDA_SUCCESS; }
API cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return answer(is_device(ordinal) ? kSuccess : kInvalidDevice);
}
API cuDeviceGetName(char *name, int room, CUdevice device) {
  snprintf(name, room, "cusim emulated device %d", device);
  return CUDA_SUCCESS;
}
API cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = attribute(which, device);
  return CUDA_SUCCESS;
}
API cuDeviceTotalMem_v2(size_t *bytes, CUdevice) { return *bytes = settings().device_bytes, CUDA_SUCCESS; }
API cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  char text[sizeof uuid->bytes + 1];
  snprintf(text, sizeof text, "cusim-device-%03d", device);
  memcpy(uuid->bytes, text, sizeof uuid->bytes);
  return CUDA_SUCCESS;
}
API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid(uuid, device); }
API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = context_of(device), CUDA_SUCCESS; }
API cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
API cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
API cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return CUDA_SUCCESS;
}
API cuCtxGetCurrent(CUcontext *context) {
  *context = has_context() ? context_of(current_device()) : nullptr;
  return CUDA_SUCCESS;
}
API cuCtxSetCurrent(CUcontext context) {
  make_context(context != nullptr);
  if (context) use_device((int)((char *)context - contexts));
  return CUDA_SUCCESS;
}
API cuCtxGetDevice(CUdevice *device) { return *device = current_device(), CUDA_SUCCESS; }
API cuCtxCreate_v2(CUcontext *context, unsigned, CUdevice device) {
  use_device(device);
  make_context(true);
  return *context = context_of(device), CUDA_SUCCESS;
}
API cuCtxDestroy_v2(CUcontext) { return CUDA_SUCCESS; }
API cuCtxSynchronize() {
  synchronize_device(current_device());
  return answer(fault());
}
API cuStreamGetCtx(CUstream handle, CUcontext *context) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  return *context = context_of(stream->device), CUDA_SUCCESS;
}

API cuModuleLoadData(CUmodule *module, const void *image) { return answer(load_module(image, (Module **)module)); }
API cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned, CUjit_option *, void **) {
  return cuModuleLoadData(module, image);
}
API cuModuleLoad(CUmodule *module, const char *path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return answer(kFileNotFound);
  std::vector<char> image((std::istreambuf_iterator<char>(file)), {});
  image.resize(image.size() + sizeof(ImageHeader));  // a short file is then no image, instead of a read beyond it
  return cuModuleLoadData(module, image.data());
}
API cuModuleUnload(CUmodule module) {
  unload_module((Module *)module);
  return CUDA_SUCCESS;
}
API cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)find_function((Module *)module, name);
  return answer(*function ? kSuccess : kNotFound);
}
API cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *size, CUmodule module, const char *name) {
  size_t found = 0;
  void *address = find_variable((Module *)module, name, &found);
  if (!address) return answer(kNotFound);
  if (pointer) *pointer = (CUdeviceptr)address;
  if (size) *size = found;
  return CUDA_SUCCESS;
}
API cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = ((Function *)function)->max_dynamic_shared; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 80; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
API cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) ((Function *)function)->max_dynamic_shared = value;
  return CUDA_SUCCESS;
}
API cuLaunchKernel(CUfunction handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   CUstream stream, void **parameters, void **extra) {
  const auto *function = (const Function *)handle;
  trace("launch %s <<<(%u, %u, %u), (%u, %u, %u)>>>", function->kernel->name, gx, gy, gz, bx, by, bz);
  if (extra && !parameters) return answer(kNotSupported);
  unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  return answer(launch(function, grid, block, shared, stream, parameters));
}
API cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **) {
  return answer(kNotSupported);
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction, int block_size, size_t) {
  return *blocks = block_size > 0 ? 2048 / block_size : 1, CUDA_SUCCESS;
}
API cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction, CUoccupancyB2DSize, size_t, int) {
  *grid = 8;
  *block = 256;
  return CUDA_SUCCESS;
}
API cuLinkCreate_v2(unsigned, CUjit_option *, void **, CUlinkState *) { return answer(kNotSupported); }
API cuLinkAddData_v2(CUlinkState, CUjitInputType, void *, size_t, const char *, unsigned, CUjit_option *, void **) {
  return answer(kNotSupported);
}
API cuLinkAddFile_v2(CUlinkState, CUjitInputType, const char *, unsigned, CUjit_option *, void **) { return answer(kNotSupported); }
API cuLinkComplete(CUlinkState, void **, size_t *) { return answer(kNotSupported); }
API cuLinkDestroy(CUlinkState) { return answer(kNotSupported); }

API cuGetErrorName(CUresult status, const char **name) { return *name = status_text(status).driver, CUDA_SUCCESS; }
API cuGetErrorString(CUresult status, const char **meaning) { return *meaning = status_text(status).meaning, CUDA_SUCCESS; }
