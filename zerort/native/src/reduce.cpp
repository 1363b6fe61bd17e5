// Tiles keep the running result in the first-level cache, so each source is read once and `out` written once, whatever
// their number. `out` is written only after the tile of every source has been read: that is what makes in-place safe.
#include "reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "compiler.h"
#include "half.h"
#include "strips.h"

namespace zerort {
namespace {

constexpr std::size_t tile_bytes = 8192;

struct Sum {
  template <typename T>
  static ZERORT_INLINE T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};

// Comparisons with NaN are false: `a != a` hands a NaN on from the left, the fall-through one from the right.
struct Max {
  template <typename T>
  static ZERORT_INLINE T apply(T a, T b) {
    return (a >= b) | (a != a) ? a : b;
  }
};

struct Min {
  template <typename T>
  static ZERORT_INLINE T apply(T a, T b) {
    return (a <= b) | (a != a) ? a : b;
  }
};

template <typename Op, typename T>
ZERORT_INLINE void combine(T* out, const T* a, const T* b, std::size_t numel) {
  const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
    ZERORT_INDEPENDENT
    for (std::size_t i = start; i < start + count; ++i) out[i] = Op::apply(a[i], b[i]);
  };
  in_strips<strip_bytes / sizeof(T)>(numel, body, a, b, out);
}

// Two neighbouring halves as one word; they are aligned to two bytes only.
struct Word {
  char bytes[4];

  ZERORT_INLINE std::uint32_t get() const {
    std::uint32_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
  }
  template <typename Half>
  ZERORT_INLINE void set(float low, float high) {
    const std::uint32_t word = Half::narrow_low(low) | Half::narrow_high(high);
    std::memcpy(bytes, &word, sizeof word);
  }
};

// The running float32 values of a tile of words: kept apart, they need no shuffles before the end.
struct Planes {
  static constexpr std::size_t words = tile_bytes / sizeof(float);
  alignas(64) float low[words];
  alignas(64) float high[words];
};

constexpr std::size_t word_strip = strip_bytes / sizeof(Word);

// Each step of a half-precision reduction: the first two sources, the ones between, the last; or both, if there are
// two.
template <typename Op, typename Half>
struct HalfSteps {
  static ZERORT_INLINE void both(Word* out, const Word* a, const Word* b, std::size_t words) {
    const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
      ZERORT_INDEPENDENT
      for (std::size_t i = start; i < start + count; ++i) {
        const std::uint32_t x = a[i].get(), y = b[i].get();
        out[i].template set<Half>(Op::apply(Half::widen_low(x), Half::widen_low(y)),
                                  Op::apply(Half::widen_high(x), Half::widen_high(y)));
      }
    };
    in_strips<word_strip>(words, body, a, b, out);
  }

  static ZERORT_INLINE void first(float* low, float* high, const Word* a, const Word* b, std::size_t words) {
    const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
      ZERORT_INDEPENDENT
      for (std::size_t i = start; i < start + count; ++i) {
        const std::uint32_t x = a[i].get(), y = b[i].get();
        low[i] = Op::apply(Half::widen_low(x), Half::widen_low(y));
        high[i] = Op::apply(Half::widen_high(x), Half::widen_high(y));
      }
    };
    in_strips<word_strip>(words, body, a, b);
  }

  static ZERORT_INLINE void next(float* low, float* high, const Word* a, std::size_t words) {
    const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
      ZERORT_INDEPENDENT
      for (std::size_t i = start; i < start + count; ++i) {
        const std::uint32_t x = a[i].get();
        low[i] = Op::apply(low[i], Half::widen_low(x));
        high[i] = Op::apply(high[i], Half::widen_high(x));
      }
    };
    in_strips<word_strip>(words, body, a);
  }

  static ZERORT_INLINE void last(Word* out, const float* low, const float* high, const Word* a, std::size_t words) {
    const auto body = [=](std::size_t start, std::size_t count) ZERORT_INLINE_LAMBDA {
      ZERORT_INDEPENDENT
      for (std::size_t i = start; i < start + count; ++i) {
        const std::uint32_t x = a[i].get();
        out[i].template set<Half>(Op::apply(low[i], Half::widen_low(x)), Op::apply(high[i], Half::widen_high(x)));
      }
    };
    in_strips<word_strip>(words, body, a, out);
  }
};

}  // namespace

namespace reduce_loops {

#define ZERORT_WHOLE(clones, name, Op, T)                                                         \
  clones void name(void* out, const void* a, const void* b, std::size_t numel) {                  \
    combine<Op>(static_cast<T*>(out), static_cast<const T*>(a), static_cast<const T*>(b), numel); \
  }
#define ZERORT_WHOLE_ORDER(clones, dtype, T) \
  ZERORT_WHOLE(clones, max_##dtype, Max, T)  \
  ZERORT_WHOLE(clones, min_##dtype, Min, T)
#define ZERORT_WHOLE_ALL(clones, dtype, T)  \
  ZERORT_WHOLE(clones, sum_##dtype, Sum, T) \
  ZERORT_WHOLE_ORDER(clones, dtype, T)
ZERORT_WHOLE_ALL(ZERORT_CLONES, float32, float)
ZERORT_WHOLE_ALL(ZERORT_CLONES, float64, double)
// Integers carry counters and flags, no hot loop of ours: one machine code each keeps the module small.
ZERORT_WHOLE_ALL(, uint8, std::uint8_t)
ZERORT_WHOLE_ALL(, uint16, std::uint16_t)
ZERORT_WHOLE_ALL(, uint32, std::uint32_t)
ZERORT_WHOLE_ALL(, uint64, std::uint64_t)
// Signed sums are the unsigned ones: the same bits, and wrapping around is defined there.
ZERORT_WHOLE_ORDER(, int8, std::int8_t)
ZERORT_WHOLE_ORDER(, int16, std::int16_t)
ZERORT_WHOLE_ORDER(, int32, std::int32_t)
ZERORT_WHOLE_ORDER(, int64, std::int64_t)
#undef ZERORT_WHOLE_ALL
#undef ZERORT_WHOLE_ORDER
#undef ZERORT_WHOLE

#define ZERORT_HALF(op_dtype, Op, Half)                                                                      \
  ZERORT_CLONES void both_##op_dtype(Word* out, const Word* a, const Word* b, std::size_t words) {            \
    HalfSteps<Op, Half>::both(out, a, b, words);                                                              \
  }                                                                                                          \
  ZERORT_CLONES void first_##op_dtype(Planes& planes, const Word* a, const Word* b, std::size_t words) {      \
    HalfSteps<Op, Half>::first(planes.low, planes.high, a, b, words);                                         \
  }                                                                                                          \
  ZERORT_CLONES void next_##op_dtype(Planes& planes, const Word* a, std::size_t words) {                      \
    HalfSteps<Op, Half>::next(planes.low, planes.high, a, words);                                             \
  }                                                                                                          \
  ZERORT_CLONES void last_##op_dtype(Word* out, const Planes& planes, const Word* a, std::size_t words) {     \
    HalfSteps<Op, Half>::last(out, planes.low, planes.high, a, words);                                        \
  }
ZERORT_HALF(sum_float16, Sum, Float16)
ZERORT_HALF(max_float16, Max, Float16)
ZERORT_HALF(min_float16, Min, Float16)
ZERORT_HALF(sum_bfloat16, Sum, BFloat16)
ZERORT_HALF(max_bfloat16, Max, BFloat16)
ZERORT_HALF(min_bfloat16, Min, BFloat16)
#undef ZERORT_HALF

}  // namespace reduce_loops

namespace {

using WholeLoop = void (*)(void*, const void*, const void*, std::size_t);

struct HalfLoops {
  void (*both)(Word*, const Word*, const Word*, std::size_t);
  void (*first)(Planes&, const Word*, const Word*, std::size_t);
  void (*next)(Planes&, const Word*, std::size_t);
  void (*last)(Word*, const Planes&, const Word*, std::size_t);
};

using namespace reduce_loops;

const WholeLoop whole_table[dtype_count][reduction_count] = {
    {sum_float32, max_float32, min_float32},
    {sum_float64, max_float64, min_float64},
    {nullptr, nullptr, nullptr},  // float16: half_table
    {nullptr, nullptr, nullptr},  // bfloat16: half_table
    {sum_uint8, max_int8, min_int8},
    {sum_uint16, max_int16, min_int16},
    {sum_uint32, max_int32, min_int32},
    {sum_uint64, max_int64, min_int64},
    {sum_uint8, max_uint8, min_uint8},
    {sum_uint16, max_uint16, min_uint16},
    {sum_uint32, max_uint32, min_uint32},
    {sum_uint64, max_uint64, min_uint64},
};

#define ZERORT_ROW(op_dtype) {both_##op_dtype, first_##op_dtype, next_##op_dtype, last_##op_dtype}
const HalfLoops half_table[2][reduction_count] = {
    {ZERORT_ROW(sum_float16), ZERORT_ROW(max_float16), ZERORT_ROW(min_float16)},
    {ZERORT_ROW(sum_bfloat16), ZERORT_ROW(max_bfloat16), ZERORT_ROW(min_bfloat16)},
};
#undef ZERORT_ROW

const char* at(const void* base, std::size_t offset) { return static_cast<const char*>(base) + offset; }
char* at(void* base, std::size_t offset) { return static_cast<char*>(base) + offset; }

void reduce_whole(WholeLoop loop, std::size_t size, void* out, const void* const* sources, std::size_t count,
                  std::size_t numel) {
  if (count == 2) {
    loop(out, sources[0], sources[1], numel);
    return;
  }
  alignas(64) char tile[tile_bytes];
  const std::size_t step = tile_bytes / size;
  for (std::size_t start = 0; start < numel; start += step) {
    const std::size_t turn = std::min(step, numel - start), offset = start * size;
    loop(tile, at(sources[0], offset), at(sources[1], offset), turn);
    for (std::size_t k = 2; k + 1 < count; ++k) loop(tile, tile, at(sources[k], offset), turn);
    loop(at(out, offset), tile, at(sources[count - 1], offset), turn);
  }
}

// An even number of halves: `words` pairs.
void reduce_words(const HalfLoops& loops, void* out, const void* const* sources, std::size_t count, std::size_t words) {
  const auto source = [=](std::size_t k, std::size_t start) { return static_cast<const Word*>(sources[k]) + start; };
  Word* const target = static_cast<Word*>(out);
  if (count == 2) {
    loops.both(target, source(0, 0), source(1, 0), words);
    return;
  }
  Planes planes;
  for (std::size_t start = 0; start < words; start += Planes::words) {
    const std::size_t turn = std::min(Planes::words, words - start);
    loops.first(planes, source(0, start), source(1, start), turn);
    for (std::size_t k = 2; k + 1 < count; ++k) loops.next(planes, source(k, start), turn);
    loops.last(target + start, planes, source(count - 1, start), turn);
  }
}

void reduce_half(const HalfLoops& loops, void* out, const void* const* sources, std::size_t count, std::size_t numel) {
  reduce_words(loops, out, sources, count, numel / 2);
  if (numel % 2 == 0) return;
  // The odd one at the end: moved into words of its own, since the word around it reaches beyond the arrays.
  const std::size_t offset = (numel - 1) * 2;
  std::vector<std::uint32_t> words(count, 0);
  std::vector<const void*> pointers(count);
  for (std::size_t k = 0; k < count; ++k) {
    std::memcpy(&words[k], at(sources[k], offset), 2);
    pointers[k] = &words[k];
  }
  std::uint32_t result;
  reduce_words(loops, &result, pointers.data(), count, 1);
  std::memcpy(at(out, offset), &result, 2);
}

}  // namespace

void reduce(Dtype dtype, Reduction reduction, void* out, const void* const* sources, std::size_t count,
            std::size_t numel) {
  const auto op = static_cast<std::size_t>(reduction);
  if (count == 1)
    std::memmove(out, sources[0], numel * itemsize(dtype));
  else if (is_half(dtype))
    reduce_half(half_table[dtype == Dtype::bfloat16][op], out, sources, count, numel);
  else
    reduce_whole(whole_table[static_cast<std::size_t>(dtype)][op], itemsize(dtype), out, sources, count, numel);
}

}  // namespace zerort
