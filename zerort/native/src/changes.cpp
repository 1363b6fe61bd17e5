#include "changes.h"

#include <algorithm>
#include <cstring>

#include "compiler.h"

namespace zerort {
namespace {

constexpr std::size_t group = 64;      // elements that are compared at once
constexpr std::uint8_t escape = 255;   // 255 elements without a change, and none after them

// Bit i: element i of the group differs.
template <typename T>
ZERORT_INLINE std::uint64_t differing(const T* base, const T* now, std::size_t count) {
  if (count == group) {
    T any = 0;
    for (std::size_t i = 0; i < group; ++i) any |= static_cast<T>(base[i] ^ now[i]);
    if (any == 0) return 0;
  }
  std::uint8_t flags[group] = {};
  if (count == group)
    for (std::size_t i = 0; i < group; ++i) flags[i] = base[i] != now[i];
  else
    for (std::size_t i = 0; i < count; ++i) flags[i] = base[i] != now[i];
  std::uint64_t mask = 0;
  for (std::size_t byte = 0; byte < 8; ++byte) {
    std::uint64_t eight;
    std::memcpy(&eight, flags + 8 * byte, 8);
    mask |= (eight * 0x0102040810204080u >> 56) << (8 * byte);  // flag i of the eight to bit i
  }
  return mask;
}

// Calls visit(index) for every element that differs, in order, until it returns false.
template <typename T, typename Visit>
ZERORT_INLINE bool each_change(const T* base, const T* now, std::size_t numel, Visit visit) {
  for (std::size_t at = 0; at < numel; at += group)
    for (std::uint64_t mask = differing(base + at, now + at, std::min(group, numel - at)); mask; mask &= mask - 1)
      if (!visit(at + static_cast<std::size_t>(__builtin_ctzll(mask)))) return false;
  return true;
}

template <typename T>
ZERORT_INLINE Changes find(const T* base, const T* now, std::size_t numel) {
  Changes found{0, 0};
  std::size_t next = 0;  // first element after the last change
  each_change(base, now, numel, [&](std::size_t index) ZERORT_INLINE_LAMBDA {
    ++found.changed;
    found.gap_nbytes += 1 + (index - next) / escape;
    next = index + 1;
    return true;
  });
  return found;
}

template <typename T>
ZERORT_INLINE bool gaps_of(const T* base, const T* now, std::size_t numel, Changes sizes, std::uint8_t* gaps, T* values) {
  const std::uint8_t* const gaps_end = gaps + sizes.gap_nbytes;
  T* const values_end = values + sizes.changed;
  std::size_t next = 0;
  const bool fits = each_change(base, now, numel, [&](std::size_t index) ZERORT_INLINE_LAMBDA {
    std::size_t gap = index - next;
    if (values == values_end || static_cast<std::size_t>(gaps_end - gaps) < 1 + gap / escape) return false;
    for (; gap >= escape; gap -= escape) *gaps++ = escape;
    *gaps++ = static_cast<std::uint8_t>(gap);
    *values++ = now[index];
    next = index + 1;
    return true;
  });
  return fits && gaps == gaps_end && values == values_end;
}

template <typename T>
ZERORT_INLINE bool bitmap_of(const T* base, const T* now, std::size_t numel, Changes sizes, std::uint8_t* bitmap,
                             T* values) {
  T* const values_end = values + sizes.changed;
  std::memset(bitmap, 0, (numel + 7) / 8);
  const bool fits = each_change(base, now, numel, [&](std::size_t index) ZERORT_INLINE_LAMBDA {
    if (values == values_end) return false;
    bitmap[index / 8] = static_cast<std::uint8_t>(bitmap[index / 8] | 1u << index % 8);
    *values++ = now[index];
    return true;
  });
  return fits && values == values_end;
}

template <typename T>
ZERORT_INLINE bool put_gaps(T* target, std::size_t numel, Changes sizes, const std::uint8_t* gaps, const T* values) {
  std::size_t index = 0, put = 0;
  for (std::size_t at = 0; at < sizes.gap_nbytes; ++at) {
    index += gaps[at];
    if (gaps[at] == escape) continue;
    if (index >= numel || put == sizes.changed) return false;
    target[index++] = values[put++];
  }
  return put == sizes.changed;
}

template <typename T>
ZERORT_INLINE bool put_bitmap(T* target, std::size_t numel, Changes sizes, const std::uint8_t* bitmap, const T* values) {
  std::size_t put = 0;
  for (std::size_t byte = 0; byte < (numel + 7) / 8; ++byte)
    for (unsigned bits = bitmap[byte]; bits; bits &= bits - 1) {
      const std::size_t index = 8 * byte + static_cast<std::size_t>(__builtin_ctz(bits));
      if (index >= numel || put == sizes.changed) return false;
      target[index] = values[put++];
    }
  return put == sizes.changed;
}

template <typename Work>
auto by_itemsize(std::size_t itemsize, Work work) {
  switch (itemsize) {
    case 1: return work(std::uint8_t{});
    case 2: return work(std::uint16_t{});
    case 4: return work(std::uint32_t{});
    default: return work(std::uint64_t{});
  }
}

template <std::size_t itemsize>
ZERORT_INLINE void split(std::uint8_t* planes, const std::uint8_t* elements, std::size_t numel) {
  for (std::size_t at = 0; at < numel; at += group)
    for (std::size_t b = 0; b < itemsize; ++b)
      for (std::size_t i = at; i < std::min(at + group, numel); ++i)
        planes[b * numel + i] = elements[i * itemsize + b];
}

template <std::size_t itemsize>
ZERORT_INLINE void join(std::uint8_t* elements, const std::uint8_t* planes, std::size_t numel) {
  for (std::size_t at = 0; at < numel; at += group)
    for (std::size_t i = at; i < std::min(at + group, numel); ++i)
      for (std::size_t b = 0; b < itemsize; ++b) elements[i * itemsize + b] = planes[b * numel + i];
}

}  // namespace

namespace change_loops {

#define ZERORT_CHANGES(T)                                                                                        \
  ZERORT_CLONES Changes find_each(const T* base, const T* now, std::size_t numel) { return find(base, now, numel); } \
  ZERORT_CLONES bool gaps_each(const T* base, const T* now, std::size_t numel, Changes sizes, std::uint8_t* gaps, \
                               T* values) {                                                                      \
    return gaps_of(base, now, numel, sizes, gaps, values);                                                       \
  }                                                                                                              \
  ZERORT_CLONES bool bitmap_each(const T* base, const T* now, std::size_t numel, Changes sizes,                  \
                                 std::uint8_t* bitmap, T* values) {                                              \
    return bitmap_of(base, now, numel, sizes, bitmap, values);                                                   \
  }
ZERORT_CHANGES(std::uint8_t)
ZERORT_CHANGES(std::uint16_t)
ZERORT_CHANGES(std::uint32_t)
ZERORT_CHANGES(std::uint64_t)
#undef ZERORT_CHANGES

ZERORT_CLONES void split2(std::uint8_t* planes, const std::uint8_t* elements, std::size_t numel) {
  split<2>(planes, elements, numel);
}
ZERORT_CLONES void split4(std::uint8_t* planes, const std::uint8_t* elements, std::size_t numel) {
  split<4>(planes, elements, numel);
}
ZERORT_CLONES void split8(std::uint8_t* planes, const std::uint8_t* elements, std::size_t numel) {
  split<8>(planes, elements, numel);
}
ZERORT_CLONES void join2(std::uint8_t* elements, const std::uint8_t* planes, std::size_t numel) {
  join<2>(elements, planes, numel);
}
ZERORT_CLONES void join4(std::uint8_t* elements, const std::uint8_t* planes, std::size_t numel) {
  join<4>(elements, planes, numel);
}
ZERORT_CLONES void join8(std::uint8_t* elements, const std::uint8_t* planes, std::size_t numel) {
  join<8>(elements, planes, numel);
}

}  // namespace change_loops

Changes find_changes(const void* base, const void* now, std::size_t numel, std::size_t itemsize) {
  return by_itemsize(itemsize, [&](auto zero) {
    using T = decltype(zero);
    return change_loops::find_each(static_cast<const T*>(base), static_cast<const T*>(now), numel);
  });
}

bool write_gaps(const void* base, const void* now, std::size_t numel, std::size_t itemsize, Changes sizes,
                std::uint8_t* gaps, void* values) {
  return by_itemsize(itemsize, [&](auto zero) {
    using T = decltype(zero);
    return change_loops::gaps_each(static_cast<const T*>(base), static_cast<const T*>(now), numel, sizes, gaps,
                                   static_cast<T*>(values));
  });
}

bool write_bitmap(const void* base, const void* now, std::size_t numel, std::size_t itemsize, Changes sizes,
                  std::uint8_t* bitmap, void* values) {
  return by_itemsize(itemsize, [&](auto zero) {
    using T = decltype(zero);
    return change_loops::bitmap_each(static_cast<const T*>(base), static_cast<const T*>(now), numel, sizes, bitmap,
                                     static_cast<T*>(values));
  });
}

bool apply_gaps(void* target, std::size_t numel, std::size_t itemsize, Changes sizes, const std::uint8_t* gaps,
                const void* values) {
  return by_itemsize(itemsize, [&](auto zero) {
    using T = decltype(zero);
    return put_gaps(static_cast<T*>(target), numel, sizes, gaps, static_cast<const T*>(values));
  });
}

bool apply_bitmap(void* target, std::size_t numel, std::size_t itemsize, Changes sizes, const std::uint8_t* bitmap,
                  const void* values) {
  return by_itemsize(itemsize, [&](auto zero) {
    using T = decltype(zero);
    return put_bitmap(static_cast<T*>(target), numel, sizes, bitmap, static_cast<const T*>(values));
  });
}

void split_planes(std::uint8_t* planes, const void* elements, std::size_t numel, std::size_t itemsize) {
  const auto* from = static_cast<const std::uint8_t*>(elements);
  if (itemsize == 1) std::memcpy(planes, from, numel);
  if (itemsize == 2) change_loops::split2(planes, from, numel);
  if (itemsize == 4) change_loops::split4(planes, from, numel);
  if (itemsize == 8) change_loops::split8(planes, from, numel);
}

void join_planes(void* elements, const std::uint8_t* planes, std::size_t numel, std::size_t itemsize) {
  auto* to = static_cast<std::uint8_t*>(elements);
  if (itemsize == 1) std::memcpy(to, planes, numel);
  if (itemsize == 2) change_loops::join2(to, planes, numel);
  if (itemsize == 4) change_loops::join4(to, planes, numel);
  if (itemsize == 8) change_loops::join8(to, planes, numel);
}

}  // namespace zerort
