// CRC-32C (Castagnoli), the checksum of checkpoint shards and stored tiers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerort {

// The checksum of what `value` already covers, followed by these bytes; `value` is 0 at the start. `portable` keeps to
// the tables even where the CPU has an instruction for it: tests compare the two.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value, bool portable = false);

// The checksum of every `grain` bytes, and of the rest, into `sums`; the bytes are copied to `copy` while they are in the
// cache, unless it is null.
void crc32c_grains(const void* data, std::size_t nbytes, std::size_t grain, std::uint32_t* sums, void* copy);

// The checksum of A followed by B, from those of A and of B and B's length in bytes.
std::uint32_t crc32c_combine(std::uint32_t a, std::uint32_t b, std::uint64_t length_of_b);

}  // namespace zerort
