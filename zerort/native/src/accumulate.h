// Adding an array of lower precision to one of higher, in place.
#pragma once

#include <cstddef>

#include "dtypes.h"

namespace zerort {

// True if `accumulate` knows the pair: the same floating-point type, or a source of lower precision.
bool accumulable(Dtype to, Dtype from);

// out[i] += source[i], computed as `to` (float16 and bfloat16: as float32, rounded once). The ranges are the same or
// lie apart.
void accumulate(Dtype to, void* out, Dtype from, const void* source, std::size_t numel);

}  // namespace zerort
