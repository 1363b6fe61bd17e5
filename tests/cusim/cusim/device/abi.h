// What a compiled kernel and the emulator know of each other. Included by both sides.
#pragma once

struct cusim_index { unsigned x, y, z; };

// Where the running CUDA thread is; one per stream worker, rewritten for every CUDA thread.
struct cusim_position {
  cusim_index thread, block, block_size, grid_size;
  char *dynamic_shared;  // extern __shared__ …[]
  char *warp_exchange;   // 32 slots of 16 bytes: what the lanes of a warp show each other
  unsigned lane;
};

struct cusim_parameter {
  unsigned size;
  bool is_pointer;
};

// One kernel of a compiled image; the image's `cusim_kernels` ends with a null name.
struct cusim_kernel {
  const char *name;
  void *function;
  void (*call)(void *function, void **arguments);
  int parameter_count;
  const cusim_parameter *parameters;
};

extern "C" {
cusim_position *cusim_where() __attribute__((const));
void cusim_barrier();                    // __syncthreads
void cusim_warp_barrier(unsigned mask);  // __syncwarp
void cusim_atomic_access(void *pointer, unsigned size);
}
