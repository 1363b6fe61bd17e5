// Elements whose bits changed, and byte planes: lossless, over elements of 1, 2, 4 or 8 bytes. The definitions are in
// zerort/native/reference/changes.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerort {

struct Changes {
  std::size_t changed;     // elements that differ
  std::size_t gap_nbytes;  // bytes that their positions take as gaps
};

Changes find_changes(const void* base, const void* now, std::size_t numel, std::size_t itemsize);

// Positions as gaps or as a bitmap, and values. The sizes are those that `find_changes` gave for the same arrays: no more
// is written, and false is returned, if the arrays have changed since.
bool write_gaps(const void* base, const void* now, std::size_t numel, std::size_t itemsize, Changes sizes,
                std::uint8_t* gaps, void* values);
bool write_bitmap(const void* base, const void* now, std::size_t numel, std::size_t itemsize, Changes sizes,
                  std::uint8_t* bitmap, void* values);

// Put values where the positions say. False if these do not fit `numel` elements and `sizes`: nothing outside is written.
bool apply_gaps(void* target, std::size_t numel, std::size_t itemsize, Changes sizes, const std::uint8_t* gaps,
                const void* values);
bool apply_bitmap(void* target, std::size_t numel, std::size_t itemsize, Changes sizes, const std::uint8_t* bitmap,
                  const void* values);

// Plane b has byte b of every element: planes[b * numel + i] = byte b of element i.
void split_planes(std::uint8_t* planes, const void* elements, std::size_t numel, std::size_t itemsize);
void join_planes(void* elements, const std::uint8_t* planes, std::size_t numel, std::size_t itemsize);

}  // namespace zerort
