// The n-way reduction that every host collective ends in.
#pragma once

#include <cstddef>

#include "dtypes.h"

namespace zerort {

// out[i] = s[0][i] (op) s[1][i] …, in that order, for count >= 1 sources; out may be one of the sources, or any range
// that does not partially overlap one. Half precision is summed in float32 and rounded once; integers wrap around; NaN
// wins max and min. Touches no Python: call it without the GIL.
void reduce(Dtype dtype, Reduction reduction, void* out, const void* const* sources, std::size_t count,
            std::size_t numel);

}  // namespace zerort
