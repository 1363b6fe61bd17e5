// NCCL's transfers: what a stream's worker does for a collective, or for the sends and receives of one group.
#pragma once
#include <vector>

#include "nccl_wire.h"

namespace cusim::nccl {

void run_collective(Wire &wire, const Call &call, const char *from, char *to);

struct Transfer {
  Call call;  // a send or a receive
  char *data;
};
void run_transfers(Wire &wire, std::vector<Transfer> transfers);

}  // namespace cusim::nccl
