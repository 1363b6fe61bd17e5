// NCCL's order: operations of two communicators on one device must not run at once.
//
// A GPU may have no room for both. Ranks whose GPUs begin with different ones then wait for each other for ever, now and
// then, on some machines. Here every pair without an order is a finding, also when this run ended.
#pragma once
#include "race.h"

namespace cusim::nccl {

// Called when an operation of a communicator begins on a device.
void expect_order(const void *communicator, int device, const Operation &operation);
void forget_order(const void *communicator);

}  // namespace cusim::nccl
