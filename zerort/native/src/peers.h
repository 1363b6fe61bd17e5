// Peers: what a rank does with the memory that the ranks of its node have shown each other at a meeting.
// Touches no Python: call it without the GIL if there is much to do.
#pragma once

#include <vector>

#include "dtypes.h"
#include "meeting.h"

namespace zerort {

class Peers : public Meeting {
 public:
  Peers(std::uintptr_t control, int rank, int size, int spins, int yields)
      : Meeting(control, rank, size, spins, yields), sources_(std::size_t(size)) {}

  // Where this process has mapped each window.
  void map_window(std::int64_t window, std::uintptr_t base);
  void unmap_window(std::int64_t window);
  // Moves whenever a window comes or goes.
  std::uint64_t version() const { return version_; }

  // out[0:numel] = source_0[first:] (op) source_1[first:] …, over all ranks in rank order.
  void reduce_sources(char* out, Dtype dtype, Reduction reduction, std::uint64_t first, std::uint64_t numel);
  // The same, but the result goes into every rank's `out`, which all lie in windows: one pass over memory instead of two.
  void reduce_into_all(Dtype dtype, Reduction reduction, std::uint64_t first, std::uint64_t numel);
  // to[0:nbytes] = rank's source from byte `first` on.
  void copy_from_source(int rank, std::uint64_t first, char* to, std::uint64_t nbytes) const {
    read(rank, call(rank).source, first, to, nbytes);
  }
  // The same of rank's out.
  void copy_from_out(int rank, std::uint64_t first, char* to, std::uint64_t nbytes) const {
    read(rank, call(rank).out, first, to, nbytes);
  }

  bool sources_in_windows() const;
  bool outs_in_windows() const;
  // Every rank's source lies in this window.
  bool all_sources_in(std::int64_t window) const;
  // Every rank's out is one and the same memory.
  bool one_out() const;

  char* mapped(const Location& location) const;

  int half = 0;  // of this rank's staging slab: the one that was used last

 private:
  struct Numbers {
    Dtype dtype;
    Reduction reduction;
    std::size_t width;
  };

  void reduce_piece(const Numbers& numbers, std::uint64_t first, std::size_t numel, char* result);
  const char* own_source() const;
  void read(int rank, const Location& from, std::uint64_t first, char* to, std::size_t nbytes) const;

  // Results on their way past the caches, or to several places, are made in tiles that stay in a core's L1 cache.
  static constexpr std::size_t kTileBytes = 8 * 1024;

  std::vector<std::uintptr_t> windows_;
  std::uint64_t version_ = 0;
  std::vector<const void*> sources_;  // one per rank, of the piece being reduced
  std::vector<char> scratch_;         // copies of peers' private memory, a block for each rank
  alignas(kCacheLine) char tile_[kTileBytes];
};

}  // namespace zerort
