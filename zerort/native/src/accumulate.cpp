#include "accumulate.h"

#include <cstdint>

#include "compiler.h"
#include "half.h"
#include "reduce.h"
#include "strips.h"

namespace zerort {
namespace {

constexpr std::size_t strip = 64;

template <typename T>
struct Whole {
  static ZERORT_INLINE T widen_low(T value) { return value; }
};

template <typename Format, typename To, typename From>
ZERORT_INLINE void add(To* out, const From* source, std::size_t numel) {
  const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
    ZERORT_INDEPENDENT
    for (std::size_t i = start; i < start + count; ++i) out[i] += Format::widen_low(source[i]);
  };
  in_strips<strip>(numel, body, source, out);
}

}  // namespace

namespace accumulate_loops {

#define ZERORT_ADD(name, Format, To, From)                                      \
  ZERORT_CLONES void name(void* out, const void* source, std::size_t numel) {   \
    add<Format>(static_cast<To*>(out), static_cast<const From*>(source), numel); \
  }
ZERORT_ADD(float32_bfloat16, BFloat16, float, std::uint16_t)
ZERORT_ADD(float32_float16, Float16, float, std::uint16_t)
ZERORT_ADD(float64_bfloat16, BFloat16, double, std::uint16_t)
ZERORT_ADD(float64_float16, Float16, double, std::uint16_t)
ZERORT_ADD(float64_float32, Whole<float>, double, float)
#undef ZERORT_ADD

}  // namespace accumulate_loops

namespace {

using AddLoop = void (*)(void*, const void*, std::size_t);

struct AddRow {
  Dtype to, from;
  AddLoop loop;
};

const AddRow add_table[] = {
    {Dtype::float32, Dtype::bfloat16, accumulate_loops::float32_bfloat16},
    {Dtype::float32, Dtype::float16, accumulate_loops::float32_float16},
    {Dtype::float64, Dtype::bfloat16, accumulate_loops::float64_bfloat16},
    {Dtype::float64, Dtype::float16, accumulate_loops::float64_float16},
    {Dtype::float64, Dtype::float32, accumulate_loops::float64_float32},
};

AddLoop find(Dtype to, Dtype from) {
  for (const AddRow& row : add_table)
    if (row.to == to && row.from == from) return row.loop;
  return nullptr;
}

}  // namespace

bool accumulable(Dtype to, Dtype from) { return (to == from && is_float(to)) || find(to, from) != nullptr; }

void accumulate(Dtype to, void* out, Dtype from, const void* source, std::size_t numel) {
  if (to == from) {
    const void* const sources[] = {out, source};
    reduce(to, Reduction::sum, out, sources, 2, numel);
  } else {
    find(to, from)(out, source, numel);
  }
}

}  // namespace zerort
