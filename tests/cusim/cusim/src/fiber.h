// Blocks: the CUDA threads of one block, as loops or, where a kernel can wait for other threads, as fibers.
//
// A kernel without a barrier runs each of its threads from start to end. One with __syncthreads, __syncwarp or a shuffle
// gets a fiber (a stack of its own) per thread; a barrier goes on with the next fiber until all have come.
#pragma once
#include "../device/abi.h"

namespace cusim {

struct Launch {
  const cusim_kernel *kernel;
  void **arguments;
  cusim_index grid, block;
  unsigned dynamic_shared;  // bytes
  bool fibers;
};

// Runs all blocks, one after the other, on the calling thread. False: the kernel's threads wait for each other forever.
bool run_blocks(const Launch &launch);

}  // namespace cusim
