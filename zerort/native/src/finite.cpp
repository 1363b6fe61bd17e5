// A number is not finite if all bits of its exponent are ones. Adding the lowest of these bits to the number without its
// sign then carries into the sign's place: two operations and an "or" per vector, and one look at the result per strip.
#include "finite.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cast.h"
#include "compiler.h"
#include "memory.h"
#include "strips.h"

namespace zerort {
namespace {

constexpr std::size_t line = 64;
constexpr std::size_t tile_bytes = 8192;  // fits a first-level cache twice

template <typename Word, Word lowest>
struct Bits {
  static constexpr Word sign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  static constexpr Word magnitude = static_cast<Word>(sign - 1);

  static ZERORT_INLINE bool broken(Word word) { return (static_cast<Word>((word & magnitude) + lowest) & sign) != 0; }
};

template <typename Word, Word lowest>
ZERORT_INLINE std::size_t scan(const Word* data, std::size_t numel) {
  typedef Word Vector __attribute__((vector_size(line)));
  constexpr std::size_t n = line / sizeof(Word), lines = 16, strip = lines * n;
  using Format = Bits<Word, lowest>;
  std::size_t i = 0;
  for (; i + strip <= numel; i += strip) {
    fetch<strip>(data, i);
    Vector carried[2] = {};
    for (std::size_t k = 0; k < lines; k += 2) {
      Vector first, second;
      std::memcpy(&first, data + i + k * n, line);
      std::memcpy(&second, data + i + (k + 1) * n, line);
      carried[0] |= (first & Format::magnitude) + lowest;
      carried[1] |= (second & Format::magnitude) + lowest;
    }
    carried[0] |= carried[1];
    carried[0] &= Format::sign;
    std::uint64_t parts[line / 8], any = 0;
    std::memcpy(parts, carried, line);
    for (const std::uint64_t part : parts) any |= part;
    if (any != 0) break;  // in this strip: found below
  }
  for (; i < numel; ++i)
    if (Format::broken(data[i])) return i;
  return numel;
}

}  // namespace

namespace finite_loops {

#define ZERORT_SCAN(name, Word, lowest)                                    \
  ZERORT_CLONES std::size_t name(const void* data, std::size_t numel) {    \
    return scan<Word, lowest>(static_cast<const Word*>(data), numel);      \
  }
ZERORT_SCAN(float32, std::uint32_t, 0x00800000u)
ZERORT_SCAN(float64, std::uint64_t, 0x0010000000000000u)
ZERORT_SCAN(float16, std::uint16_t, 0x0400u)
ZERORT_SCAN(bfloat16, std::uint16_t, 0x0080u)
#undef ZERORT_SCAN

}  // namespace finite_loops

std::size_t first_nonfinite(Dtype dtype, const void* data, std::size_t numel) {
  using Loop = std::size_t (*)(const void*, std::size_t);
  static const Loop loops[] = {finite_loops::float32, finite_loops::float64, finite_loops::float16,
                               finite_loops::bfloat16};  // in the order of Dtype
  return loops[static_cast<std::size_t>(dtype)](data, numel);
}

std::size_t copy_checked(Dtype to, void* out, Dtype from, const void* source, std::size_t numel) {
  const std::size_t to_size = itemsize(to), from_size = itemsize(from);
  const bool stream = to == from && numel * to_size >= stream_from;
  const std::size_t whole = tile_bytes / std::max(to_size, from_size);
  // Tiles end where lines of `out` do, so that no line is written in two halves past the caches.
  const std::size_t head = whole - reinterpret_cast<std::uintptr_t>(out) % line / to_size;
  std::size_t found = numel;
  for (std::size_t start = 0, end; start < numel; start = end) {
    end = std::min(numel, start == 0 ? head : start + whole);
    const std::size_t turn = end - start;
    auto* target = static_cast<char*>(out) + start * to_size;
    const auto* origin = static_cast<const char*>(source) + start * from_size;
    if (to != from) cast(to, target, from, origin, turn);
    if (found == numel) {
      // A cast may overflow, so its result counts; a copy is better read where it comes from.
      const std::size_t here = first_nonfinite(to, to == from ? origin : target, turn);
      if (here < turn) found = start + here;
    }
    if (stream)
      stream_bytes(target, origin, turn * to_size);
    else if (to == from)
      std::memcpy(target, origin, turn * to_size);
  }
  if (stream) finish_streaming();
  return found;
}

}  // namespace zerort
