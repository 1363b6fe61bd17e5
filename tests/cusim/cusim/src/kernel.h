// Kernels: images made by the emulated NVRTC (nvrtc.cpp), their functions and variables, and launches.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../device/abi.h"

namespace cusim {

// An image is this header and then a shared object.
struct ImageHeader {
  char magic[8];
  uint64_t fibers;  // whether its kernels can wait for other threads
  uint64_t flush;   // whether they take subnormal numbers for zero, and make none
  uint64_t size;    // of the shared object
};
constexpr char kImageMagic[] = "CUSIMOBJ";

struct Module;

struct Function {
  Module *module;
  const cusim_kernel *kernel;
  int max_dynamic_shared = 48 * 1024;
};

int load_module(const void *image, Module **out);
void unload_module(Module *module);
Function *find_function(Module *module, const char *name);
void *find_variable(Module *module, const char *name, size_t *size);

int launch(const Function *function, const unsigned grid[3], const unsigned block[3], unsigned dynamic_shared, const void *stream,
           void **parameters);

}  // namespace cusim
