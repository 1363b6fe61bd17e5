#include "peers.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include <sys/uio.h>

#include "memory.h"
#include "reduce.h"

namespace zerort {
namespace {

// Peers' private memory is read in blocks that stay in a core's L2 cache together with the sums made of them.
constexpr std::size_t kBlockBytes = 128 * 1024;

template <typename Body>
void for_blocks(std::uint64_t numel, std::size_t block, Body body) {
  for (std::uint64_t done = 0; done < numel; done += block)
    body(done, std::size_t(numel - done < block ? numel - done : block));
}

}  // namespace

void Peers::map_window(std::int64_t window, std::uintptr_t base) {
  if (windows_.size() <= std::size_t(window)) windows_.resize(std::size_t(window) + 1, 0);
  windows_[std::size_t(window)] = base;
  version_++;
}

void Peers::unmap_window(std::int64_t window) {
  windows_.at(std::size_t(window)) = 0;
  version_++;
}

void Peers::reduce_sources(char* out, Dtype dtype, Reduction reduction, std::uint64_t first, std::uint64_t numel) {
  const Numbers numbers{dtype, reduction, itemsize(dtype)};
  const bool in_place = out == own_source() + first * numbers.width;
  if (!sources_in_windows()) {
    for_blocks(numel, kBlockBytes / numbers.width, [&](std::uint64_t done, std::size_t here) {
      reduce_piece(numbers, first + done, here, out + done * numbers.width);
    });
  } else if (in_place || numel * numbers.width < stream_from) {
    reduce_piece(numbers, first, numel, out);
  } else {
    for_blocks(numel, kTileBytes / numbers.width, [&](std::uint64_t done, std::size_t here) {
      reduce_piece(numbers, first + done, here, tile_);
      stream_bytes(out + done * numbers.width, tile_, here * numbers.width);
    });
    finish_streaming();
  }
}

void Peers::reduce_into_all(Dtype dtype, Reduction reduction, std::uint64_t first, std::uint64_t numel) {
  const Numbers numbers{dtype, reduction, itemsize(dtype)};
  const bool large = numel * numbers.width >= stream_from;
  for_blocks(numel, kTileBytes / numbers.width, [&](std::uint64_t done, std::size_t here) {
    // Into a tile first: an `out` may be some rank's `source`, to be read before it is written.
    reduce_piece(numbers, first + done, here, tile_);
    for (int r = 0; r < size(); r++) {
      char* target = mapped(call(r).out) + (first + done) * numbers.width;
      const bool cached = call(r).out.window == call(r).source.window && call(r).out.offset == call(r).source.offset;
      if (large && !cached)
        stream_bytes(target, tile_, here * numbers.width);
      else
        std::memcpy(target, tile_, here * numbers.width);
    }
  });
  if (large) finish_streaming();
}

bool Peers::sources_in_windows() const {
  for (int r = 0; r < size(); r++)
    if (call(r).source.window == kPrivate) return false;
  return true;
}

bool Peers::outs_in_windows() const {
  for (int r = 0; r < size(); r++)
    if (call(r).out.window == kPrivate) return false;
  return true;
}

bool Peers::all_sources_in(std::int64_t window) const {
  for (int r = 0; r < size(); r++)
    if (call(r).source.window != window) return false;
  return true;
}

bool Peers::one_out() const {
  const Location& first = call(0).out;
  if (first.window == kPrivate) return false;
  for (int r = 1; r < size(); r++)
    if (call(r).out.window != first.window || call(r).out.offset != first.offset) return false;
  return true;
}

char* Peers::mapped(const Location& location) const {
  const std::uintptr_t base = windows_.at(std::size_t(location.window));
  if (base == 0) throw std::runtime_error("Expected a window that this rank has mapped, got one that it freed.");
  return reinterpret_cast<char*>(base + location.offset);
}

// Reduce elements [first, first + numel) of every rank's source into `result`; at most a block, if one is private.
void Peers::reduce_piece(const Numbers& numbers, std::uint64_t first, std::size_t numel, char* result) {
  const std::uint64_t byte = first * numbers.width;
  for (int r = 0; r < size(); r++) {
    const Location& source = call(r).source;
    if (source.window != kPrivate) {
      sources_[std::size_t(r)] = mapped(source) + byte;
    } else if (r == rank()) {
      sources_[std::size_t(r)] = own_source() + byte;
    } else {
      scratch_.resize(kBlockBytes * std::size_t(size()));
      char* copy = scratch_.data() + std::size_t(r) * kBlockBytes;
      read(r, source, byte, copy, numel * numbers.width);
      sources_[std::size_t(r)] = copy;
    }
  }
  reduce(numbers.dtype, numbers.reduction, result, sources_.data(), sources_.size(), numel);
}

const char* Peers::own_source() const {
  const Location& source = call(rank()).source;
  return source.window != kPrivate ? mapped(source) : reinterpret_cast<const char*>(source.offset);
}

void Peers::read(int rank, const Location& from, std::uint64_t first, char* to, std::size_t nbytes) const {
  if (nbytes == 0) return;
  if (from.window != kPrivate || rank == this->rank()) {
    const char* source = from.window != kPrivate ? mapped(from) : reinterpret_cast<const char*>(from.offset);
    if (source + first != to) copy_bytes(to, source + first, nbytes);
    return;
  }
  while (nbytes > 0) {
    iovec local = {to, nbytes};
    iovec remote = {reinterpret_cast<void*>(from.offset + first), nbytes};
    const ssize_t got = process_vm_readv(pid_t(pid_of(rank)), &local, 1, &remote, 1, 0);
    if (got <= 0)
      throw std::runtime_error("process_vm_readv from rank " + std::to_string(rank) + " failed: " +
                               std::strerror(errno) + ". Set ZERORT_CROSS_MEMORY=0 to stage through shared memory.");
    to += got;
    first += std::uint64_t(got);
    nbytes -= std::size_t(got);
  }
}

}  // namespace zerort
