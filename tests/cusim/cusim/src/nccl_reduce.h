// NCCL's arithmetic: reductions over the ranks' chunks, in rank order, half precision in float.
#pragma once
#include <cstddef>

#include "nccl_wire.h"

namespace cusim::nccl {

// Reduces `count` elements of every rank's slot into `out`.
void reduce_slots(const Wire &wire, void *out, size_t count, int type, int reduction);

}  // namespace cusim::nccl
