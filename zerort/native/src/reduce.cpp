// All sources side by side, a strip of a few cache lines at a time: each is one steady stream for the memory system, whatever
// their number, and the running result stays in registers. `out` is written only after the strip of every source has been
// read: that is what makes in-place safe. (Whole sources one after the other, with the result in L1, were a third slower.)
#include "reduce.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "compiler.h"
#include "half.h"
#include "strips.h"

namespace zerort {
namespace {

struct Sum {
  template <typename T>
  static ZERORT_INLINE T apply(T a, T b) {
    return a + b;
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

using Sources = const void* const*;

// A cache line of elements, as the compiler's own vector type: in registers for certain, which an array of them is not.
// The compiler cuts it into whatever the CPU has.
template <typename T>
struct Line {
  typedef T Lanes __attribute__((vector_size(64)));  // `using` drops the attribute of a dependent type
  static constexpr std::size_t numel = 64 / sizeof(T);
};

template <typename T>
ZERORT_INLINE void load(typename Line<T>::Lanes& lanes, const T* from, std::size_t numel) {
  std::memcpy(&lanes, from, numel * sizeof(T));
}

template <typename Op, typename T>
ZERORT_INLINE void take(typename Line<T>::Lanes& lanes, const T* from, std::size_t numel) {
  typename Line<T>::Lanes more = {};
  load<T>(more, from, numel);
  lanes = Op::apply(lanes, more);
}

template <typename Op, typename T>
ZERORT_INLINE void reduce_whole(T* out, Sources sources, std::size_t count, std::size_t numel) {
  constexpr std::size_t n = Line<T>::numel;
  const auto source = [=](std::size_t k) ZERORT_INLINE_LAMBDA { return static_cast<const T*>(sources[k]); };
  std::size_t i = 0;
  for (; i + 2 * n <= numel; i += 2 * n) {
    typename Line<T>::Lanes first, second;
    fetch<2 * n>(source(0), i);
    load<T>(first, source(0) + i, n);
    load<T>(second, source(0) + i + n, n);
    for (std::size_t k = 1; k < count; ++k) {
      fetch<2 * n>(source(k), i);
      take<Op, T>(first, source(k) + i, n);
      take<Op, T>(second, source(k) + i + n, n);
    }
    fetch<2 * n>(out, i);
    std::memcpy(out + i, &first, sizeof first);
    std::memcpy(out + i + n, &second, sizeof second);
  }
  for (; i < numel; i += n) {
    const std::size_t rest = numel - i < n ? numel - i : n;
    typename Line<T>::Lanes lanes = {};
    load<T>(lanes, source(0) + i, rest);
    for (std::size_t k = 1; k < count; ++k) take<Op, T>(lanes, source(k) + i, rest);
    std::memcpy(out + i, &lanes, rest * sizeof(T));
  }
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

constexpr std::size_t word_strip = 64 / sizeof(Word);  // longer strips would not stay in registers

// The running float32 values of low and high halves are kept apart: so they need no shuffles before the end.
template <typename Op, typename Half>
ZERORT_INLINE void reduce_word_strip(Word* out, Sources sources, std::size_t count, std::size_t i, std::size_t words) {
  float low[word_strip], high[word_strip];
  const Word* source = static_cast<const Word*>(sources[0]) + i;
  for (std::size_t j = 0; j < words; ++j) {
    const std::uint32_t word = source[j].get();
    low[j] = Half::widen_low(word);
    high[j] = Half::widen_high(word);
  }
  for (std::size_t k = 1; k < count; ++k) {
    source = static_cast<const Word*>(sources[k]) + i;
    for (std::size_t j = 0; j < words; ++j) {
      const std::uint32_t word = source[j].get();
      low[j] = Op::apply(low[j], Half::widen_low(word));
      high[j] = Op::apply(high[j], Half::widen_high(word));
    }
  }
  ZERORT_INDEPENDENT
  for (std::size_t j = 0; j < words; ++j) out[i + j].template set<Half>(low[j], high[j]);
}

template <typename Op, typename Half>
ZERORT_INLINE void reduce_words(Word* out, Sources sources, std::size_t count, std::size_t words) {
  std::size_t i = 0;
  for (; i + word_strip <= words; i += word_strip) {
    for (std::size_t k = 0; k < count; ++k) fetch<word_strip>(static_cast<const Word*>(sources[k]), i);
    fetch<word_strip>(out, i);
    reduce_word_strip<Op, Half>(out, sources, count, i, word_strip);
  }
  reduce_word_strip<Op, Half>(out, sources, count, i, words - i);
}

}  // namespace

namespace reduce_loops {

#define ZERORT_WHOLE(clones, name, Op, T)                                              \
  clones void name(void* out, Sources sources, std::size_t count, std::size_t numel) { \
    reduce_whole<Op>(static_cast<T*>(out), sources, count, numel);                     \
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

#define ZERORT_HALF(name, Op, Half)                                                           \
  ZERORT_CLONES void name(void* out, Sources sources, std::size_t count, std::size_t words) { \
    reduce_words<Op, Half>(static_cast<Word*>(out), sources, count, words);                   \
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

using namespace reduce_loops;

using Loop = void (*)(void*, Sources, std::size_t, std::size_t);

const Loop loops[dtype_count][reduction_count] = {
    {sum_float32, max_float32, min_float32},
    {sum_float64, max_float64, min_float64},
    {sum_float16, max_float16, min_float16},     // these two take words of two elements
    {sum_bfloat16, max_bfloat16, min_bfloat16},
    {sum_uint8, max_int8, min_int8},
    {sum_uint16, max_int16, min_int16},
    {sum_uint32, max_int32, min_int32},
    {sum_uint64, max_int64, min_int64},
    {sum_uint8, max_uint8, min_uint8},
    {sum_uint16, max_uint16, min_uint16},
    {sum_uint32, max_uint32, min_uint32},
    {sum_uint64, max_uint64, min_uint64},
};

void reduce_half(Loop loop, void* out, Sources sources, std::size_t count, std::size_t numel) {
  loop(out, sources, count, numel / 2);
  if (numel % 2 == 0) return;
  // The odd one at the end: moved into words of its own, since the word around it reaches beyond the arrays.
  const std::size_t offset = (numel - 1) * 2;
  std::vector<std::uint32_t> words(count, 0);
  std::vector<const void*> pointers(count);
  for (std::size_t k = 0; k < count; ++k) {
    std::memcpy(&words[k], static_cast<const char*>(sources[k]) + offset, 2);
    pointers[k] = &words[k];
  }
  std::uint32_t result;
  loop(&result, pointers.data(), count, 1);
  std::memcpy(static_cast<char*>(out) + offset, &result, 2);
}

}  // namespace

void reduce(Dtype dtype, Reduction reduction, void* out, const void* const* sources, std::size_t count,
            std::size_t numel) {
  const Loop loop = loops[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(reduction)];
  if (count == 1)
    std::memmove(out, sources[0], numel * itemsize(dtype));
  else if (is_half(dtype))
    reduce_half(loop, out, sources, count, numel);
  else
    loop(out, sources, count, numel);
}

}  // namespace zerort
