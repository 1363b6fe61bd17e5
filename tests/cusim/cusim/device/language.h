// CUDA's device language for a host compiler: put before every kernel that the emulated NVRTC compiles.
#pragma once
#include <cassert>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <utility>

#include <math.h>

#include "abi.h"

#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#define __CUDA_ARCH__ 800
#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __shared__ static thread_local  // a block runs on one worker, and one at a time
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))

#define threadIdx (cusim_where()->thread)
#define blockIdx (cusim_where()->block)
#define blockDim (cusim_where()->block_size)
#define gridDim (cusim_where()->grid_size)
#define warpSize 32

#include "atomics.h"
#include "intrinsics.h"
#include "registration.h"
#include "vectors.h"
#include "warp.h"
