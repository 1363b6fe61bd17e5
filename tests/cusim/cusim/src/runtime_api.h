// The CUDA runtime API: what its files share. CuPy's calls into its bundled runtime arrive here by relink.cpp.
#pragma once
#include <cuda_runtime_api.h>

#define API extern "C" cudaError_t

namespace cusim {

// Keeps an error for cudaGetLastError, as every runtime call does.
cudaError_t answer(int status);

}  // namespace cusim
