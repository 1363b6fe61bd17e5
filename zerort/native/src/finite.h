// Looking for NaN and infinity, alone or on the way of a copy.
#pragma once

#include <cstddef>

#include "dtypes.h"

namespace zerort {

// The index of the first NaN or infinity among `numel` floating-point elements, or `numel` if there is none.
std::size_t first_nonfinite(Dtype dtype, const void* data, std::size_t numel);

// out[i] = source[i] as `to`, for a castable pair of floating-point types, and the index of the first NaN or infinity in
// `out`, or `numel`. Everything is copied, whatever is found. The ranges lie apart.
std::size_t copy_checked(Dtype to, void* out, Dtype from, const void* source, std::size_t numel);

}  // namespace zerort
