// Copies and fills, with CUDA's rules of who waits: what memory a pointer names decides, not the direction given.
//
// | call        | source or destination | host                                               |
// |-------------|------------------------|---------------------------------------------------|
// | asynchronous | pinned and device      | goes on at once                                   |
// | asynchronous | from pageable          | goes on: the bytes are taken before it does       |
// | asynchronous | to pageable            | waits                                             |
// | synchronous  | device to device       | goes on at once                                   |
// | synchronous  | else                   | waits                                             |
#pragma once
#include <cstddef>

namespace cusim {

struct Rows {  // `height` rows of `width` bytes, `pitch` apart
  size_t width, height;
  size_t to_pitch, from_pitch;
};

int copy(void *to, const void *from, size_t size, const void *stream, bool asynchronous);
int copy_rows(void *to, const void *from, const Rows &rows, const void *stream, bool asynchronous);
int fill(void *to, int value, size_t size, const void *stream);

}  // namespace cusim
