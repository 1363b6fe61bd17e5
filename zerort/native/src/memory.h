// Memory as pages.
#pragma once

#include <cstddef>

namespace zerort {

// Fault every page of the range in, for writing, and change no byte of it, not even under the feet of another writer.
void touch(void* data, std::size_t nbytes);

}  // namespace zerort
