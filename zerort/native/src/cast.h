// Conversion between element types: see half.h for the rounding.
#pragma once

#include <cstddef>

#include "dtypes.h"

namespace zerort {

// True if `cast` knows the way: the same type, or float32 on one side and another float type on the other.
bool castable(Dtype to, Dtype from);

// out[i] = source[i] as `to`, for a castable pair. The ranges do not overlap, unless the types are the same.
void cast(Dtype to, void* out, Dtype from, const void* source, std::size_t numel);

}  // namespace zerort
