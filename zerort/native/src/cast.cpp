#include "cast.h"

#include <cstdint>
#include <cstring>

#include "compiler.h"
#include "half.h"
#include "strips.h"

namespace zerort {
namespace {

constexpr std::size_t strip = 64;

struct Convert {
  static ZERORT_INLINE void apply(float& out, double source) { out = static_cast<float>(source); }
  static ZERORT_INLINE void apply(double& out, float source) { out = source; }
};

template <typename Half>
struct ConvertHalf {
  static ZERORT_INLINE void apply(float& out, std::uint16_t source) { out = Half::widen_low(source); }
  static ZERORT_INLINE void apply(std::uint16_t& out, float source) {
    out = static_cast<std::uint16_t>(Half::narrow_low(source));
  }
};

template <typename Op, typename To, typename From>
ZERORT_INLINE void convert(To* out, const From* source, std::size_t numel) {
  const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
    ZERORT_INDEPENDENT
    for (std::size_t i = start; i < start + count; ++i) Op::apply(out[i], source[i]);
  };
  in_strips<strip>(numel, body, source, out);
}

}  // namespace

namespace cast_loops {

#define ZERORT_CAST(name, Op, To, From)                                            \
  ZERORT_CLONES void name(void* out, const void* source, std::size_t numel) {      \
    convert<Op>(static_cast<To*>(out), static_cast<const From*>(source), numel);   \
  }
ZERORT_CAST(bfloat16_to_float32, ConvertHalf<BFloat16>, float, std::uint16_t)
ZERORT_CAST(float16_to_float32, ConvertHalf<Float16>, float, std::uint16_t)
ZERORT_CAST(float32_to_bfloat16, ConvertHalf<BFloat16>, std::uint16_t, float)
ZERORT_CAST(float32_to_float16, ConvertHalf<Float16>, std::uint16_t, float)
ZERORT_CAST(float32_to_float64, Convert, double, float)
ZERORT_CAST(float64_to_float32, Convert, float, double)
#undef ZERORT_CAST

}  // namespace cast_loops

namespace {

using CastLoop = void (*)(void*, const void*, std::size_t);

struct CastRow {
  Dtype to, from;
  CastLoop loop;
};

const CastRow cast_table[] = {
    {Dtype::float32, Dtype::bfloat16, cast_loops::bfloat16_to_float32},
    {Dtype::float32, Dtype::float16, cast_loops::float16_to_float32},
    {Dtype::float32, Dtype::float64, cast_loops::float64_to_float32},
    {Dtype::bfloat16, Dtype::float32, cast_loops::float32_to_bfloat16},
    {Dtype::float16, Dtype::float32, cast_loops::float32_to_float16},
    {Dtype::float64, Dtype::float32, cast_loops::float32_to_float64},
};

CastLoop find(Dtype to, Dtype from) {
  for (const CastRow& row : cast_table)
    if (row.to == to && row.from == from) return row.loop;
  return nullptr;
}

}  // namespace

bool castable(Dtype to, Dtype from) { return to == from || find(to, from) != nullptr; }

void cast(Dtype to, void* out, Dtype from, const void* source, std::size_t numel) {
  if (to == from)
    std::memmove(out, source, numel * itemsize(to));
  else
    find(to, from)(out, source, numel);
}

}  // namespace zerort
