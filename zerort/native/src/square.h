// Sums of squares in double precision: what a gradient norm is made of.
#pragma once

#include <cstddef>

#include "dtypes.h"

namespace zerort {

// The sum of the squares of `numel` floating-point elements, in an order that only `numel` decides; see square.cpp.
double square_sum(Dtype dtype, const void* data, std::size_t numel);

}  // namespace zerort
