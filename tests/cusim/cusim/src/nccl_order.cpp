#include "nccl_order.h"

#include <map>
#include <mutex>

#include "report.h"

namespace cusim::nccl {

namespace {

struct Last {  // of one communicator
  int device;
  std::string name, place;
  Moment moment;
  Clock clock;
};

std::mutex mutex;
std::map<const void *, Last> &latest() {
  static auto *kept = new std::map<const void *, Last>;
  return *kept;
}

}  // namespace

void expect_order(const void *communicator, int device, const Operation &operation) {
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto &[other, last] : latest()) {
    bool ordered = operation.clock.saw(last.moment) || last.clock.saw(operation.moment);
    if (other == communicator || last.device != device || ordered) continue;
    report("nccl", last.name + " (" + last.place + ") and " + operation.name + " (" + operation.place +
                       text(") are of two communicators and have no order on device %d: a rank whose device begins with the other one waits for "
                            "ever. Let one wait for the other: an event, or a stream's wait between them.",
                            device));
  }
  latest()[communicator] = {device, operation.name, operation.place, operation.moment, operation.clock};
}

void forget_order(const void *communicator) {
  std::lock_guard<std::mutex> lock(mutex);
  latest().erase(communicator);
}

}  // namespace cusim::nccl
