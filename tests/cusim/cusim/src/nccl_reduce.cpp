#include "nccl_reduce.h"

#include <cstdint>

#include "bfloat16.h"

namespace cusim::nccl {

namespace {

enum { kSum, kProduct, kMaximum, kMinimum, kAverage };

template <class T>
T narrow(T value) {
  return value;
}
template <class T>
T narrow(float value) {
  return (T)value;
}
template <>
BFloat16 narrow<BFloat16>(float value) {
  return BFloat16::of(value);
}

template <class Accumulator>
Accumulator combine(Accumulator a, Accumulator b, int reduction) {
  switch (reduction) {
    case kProduct: return (Accumulator)(a * b);
    case kMaximum: return a > b ? a : b;
    case kMinimum: return a < b ? a : b;
    default: return (Accumulator)(a + b);
  }
}

// T is stored, Accumulator computes.
template <class T, class Accumulator>
void reduce_as(const Wire &wire, void *out, size_t count, int reduction) {
  for (size_t i = 0; i < count; i++) {
    auto at = [&](int rank) { return (Accumulator)((const T *)wire.slot(rank).data)[i]; };
    Accumulator total = at(0);
    for (int rank = 1; rank < wire.size; rank++) total = combine(total, at(rank), reduction);
    if (reduction == kAverage) total = (Accumulator)(total / (Accumulator)wire.size);
    ((T *)out)[i] = narrow<T>(total);
  }
}

}  // namespace

void reduce_slots(const Wire &wire, void *out, size_t count, int type, int reduction) {
  switch (type) {
    case 0: return reduce_as<int8_t, int8_t>(wire, out, count, reduction);
    case 1: return reduce_as<uint8_t, uint8_t>(wire, out, count, reduction);
    case 2: return reduce_as<int32_t, int32_t>(wire, out, count, reduction);
    case 3: return reduce_as<uint32_t, uint32_t>(wire, out, count, reduction);
    case 4: return reduce_as<int64_t, int64_t>(wire, out, count, reduction);
    case 5: return reduce_as<uint64_t, uint64_t>(wire, out, count, reduction);
    case 6: return reduce_as<_Float16, float>(wire, out, count, reduction);
    case 7: return reduce_as<float, float>(wire, out, count, reduction);
    case 8: return reduce_as<double, double>(wire, out, count, reduction);
    case 9: return reduce_as<BFloat16, float>(wire, out, count, reduction);
  }
}

}  // namespace cusim::nccl
