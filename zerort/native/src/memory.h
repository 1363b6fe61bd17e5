// Memory as pages and lines.
#pragma once

#include <cstddef>

namespace zerort {

// Fault every page of the range in, for writing, and change no byte of it, not even under the feet of another writer.
void touch(void* data, std::size_t nbytes);

// Results at least this long do not fit the caches next to what they are made of: they are better written past them.
constexpr std::size_t stream_from = 2 << 20;

// Copy, past the caches if `nbytes` is large and the ranges lie apart. They may overlap.
void copy_bytes(void* to, const void* from, std::size_t nbytes);

// Copy past the caches: the written lines are not read first, which saves a third of the traffic. The ranges lie apart.
// Call `finish_streaming` before another thread or process is told that the copy is there.
void stream_bytes(void* to, const void* from, std::size_t nbytes);
void finish_streaming();

}  // namespace zerort
