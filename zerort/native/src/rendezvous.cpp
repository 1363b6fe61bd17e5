// Rendezvous: how the ranks of a node wait for each other and read each other's memory, without MPI.
//
// Waiting is a short spin, a few yields, then a futex. With a core per rank the spin answers in under a microsecond; with more
// ranks than cores a spinning rank would keep the one it waits for off the core, so the spin is short and the futex soon.
#include "rendezvous.h"

#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "memory.h"
#include "reduce.h"

namespace nb = nanobind;

namespace zerort {
namespace {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "processes share these words");

// Peers' private memory is read in blocks that stay in a core's L2 cache together with the sums made of them.
constexpr std::size_t kBlockBytes = 128 * 1024;
// Results on their way past the caches, or to several places, are made in tiles that stay in a core's L1 cache.
constexpr std::size_t kTileBytes = 8 * 1024;

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the word lies in memory that several processes have mapped.
long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

std::uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::uint64_t(now.tv_sec) * 1000000000u + std::uint64_t(now.tv_nsec);
}

class Rendezvous {
 public:
  Rendezvous(std::uintptr_t control, int rank, int size, int spins, int yields)
      : control_(reinterpret_cast<Control*>(control)),
        slots_(reinterpret_cast<Slot*>(control + sizeof(Control))),
        rank_(rank), size_(size), spins_(spins), yields_(yields), sources_(std::size_t(size)) {
    Slot& mine = slots_[rank_];
    mine.pid = std::uint32_t(getpid());
    mine.arrived.store(control_->epoch.load());
    mine.since_ns = now_ns();
    mine.state.store(1);
  }

  void map_window(std::int64_t window, std::uintptr_t base) {
    if (windows_.size() <= std::size_t(window)) windows_.resize(std::size_t(window) + 1, 0);
    windows_[std::size_t(window)] = base;
  }

  void unmap_window(std::int64_t window) { windows_.at(std::size_t(window)) = 0; }

  // Say what this rank came for, and wait up to `seconds` for the others.
  Status meet(nb::bytes header, std::int64_t source_window, std::uint64_t source_offset, std::int64_t out_window,
              std::uint64_t out_offset, double seconds) {
    if (header.size() != kHeaderBytes) throw std::invalid_argument("Expected a packed header of the agreed size.");
    Slot& mine = slots_[rank_];
    turn_ = mine.meets % 2;
    Call& call = mine.calls[turn_];
    std::memcpy(call.header, header.c_str(), kHeaderBytes);
    call.source = {source_window, source_offset};
    call.out = {out_window, out_offset};
    mine.meets++;
    comparing_ = true;
    nb::gil_scoped_release release;
    arrive();
    return wait_here(seconds);
  }

  // Wait until every rank has come this far too: it has then done reading what this rank showed.
  Status part(double seconds) {
    comparing_ = false;
    nb::gil_scoped_release release;
    arrive();
    return wait_here(seconds);
  }

  Status wait(double seconds) {
    nb::gil_scoped_release release;
    return wait_here(seconds);
  }

  // Tell every rank, waiting or late, that nobody will meet here again.
  void give_up() {
    control_->broken.store(1);
    wake();
  }

  // This rank takes part no longer. Whoever waits for it now is woken to find out.
  void leave() {
    slots_[rank_].state.store(2);
    wake();
  }

  // out[0:numel] = source_0[first:] (op) source_1[first:] …, over all ranks in rank order.
  void reduce_sources(std::uintptr_t out, int dtype, int reduction, std::uint64_t first, std::uint64_t numel) {
    nb::gil_scoped_release release;
    const Numbers numbers{Dtype(dtype), Reduction(reduction), itemsize(Dtype(dtype))};
    auto* result = reinterpret_cast<char*>(out);
    const bool in_place = result == own_source() + first * numbers.width;
    if (!sources_in_windows()) {
      for_blocks(numel, kBlockBytes / numbers.width, [&](std::uint64_t done, std::size_t here) {
        reduce_piece(numbers, first + done, here, result + done * numbers.width);
      });
    } else if (in_place || numel * numbers.width < stream_from) {
      reduce_piece(numbers, first, numel, result);
    } else {
      for_blocks(numel, kTileBytes / numbers.width, [&](std::uint64_t done, std::size_t here) {
        reduce_piece(numbers, first + done, here, tile_);
        stream_bytes(result + done * numbers.width, tile_, here * numbers.width);
      });
      finish_streaming();
    }
  }

  // The same, but the result goes into every rank's `out`, which all lie in windows: one pass over memory instead of two.
  void reduce_into_all(int dtype, int reduction, std::uint64_t first, std::uint64_t numel) {
    nb::gil_scoped_release release;
    const Numbers numbers{Dtype(dtype), Reduction(reduction), itemsize(Dtype(dtype))};
    const bool large = numel * numbers.width >= stream_from;
    for_blocks(numel, kTileBytes / numbers.width, [&](std::uint64_t done, std::size_t here) {
      // Into a tile first: an `out` may be some rank's `source`, to be read before it is written.
      reduce_piece(numbers, first + done, here, tile_);
      for (int r = 0; r < size_; r++) {
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

  // to[0:nbytes] = rank's source from byte `first` on.
  void copy_from_source(int rank, std::uint64_t first, std::uintptr_t to, std::uint64_t nbytes) {
    nb::gil_scoped_release release;
    read(rank, call(rank).source, first, reinterpret_cast<char*>(to), nbytes);
  }

  // The same of rank's out.
  void copy_from_out(int rank, std::uint64_t first, std::uintptr_t to, std::uint64_t nbytes) {
    nb::gil_scoped_release release;
    read(rank, call(rank).out, first, reinterpret_cast<char*>(to), nbytes);
  }

  bool sources_in_windows() const {
    for (int r = 0; r < size_; r++)
      if (call(r).source.window == kPrivate) return false;
    return true;
  }

  bool outs_in_windows() const {
    for (int r = 0; r < size_; r++)
      if (call(r).out.window == kPrivate) return false;
    return true;
  }

  // Every rank's source lies in this window.
  bool all_sources_in(std::int64_t window) const {
    for (int r = 0; r < size_; r++)
      if (call(r).source.window != window) return false;
    return true;
  }

  // Every rank's out is one and the same memory.
  bool one_out() const {
    const Location& first = call(0).out;
    if (first.window == kPrivate) return false;
    for (int r = 1; r < size_; r++)
      if (call(r).out.window != first.window || call(r).out.offset != first.offset) return false;
    return true;
  }

 private:
  void arrive() {
    // Only ranks that have seen the current epoch arrive, so it cannot move before all of them have.
    const std::uint32_t epoch = control_->epoch.load(std::memory_order_acquire);
    Slot& mine = slots_[rank_];
    mine.since_ns = now_ns();
    mine.arrived.store(epoch + 1, std::memory_order_release);
    target_ = epoch + 1;
    if (control_->count.fetch_add(1, std::memory_order_acq_rel) + 1 == std::uint32_t(size_)) {
      control_->count.store(0, std::memory_order_relaxed);
      control_->epoch.store(epoch + 1, std::memory_order_seq_cst);
      if (control_->sleepers.load(std::memory_order_seq_cst)) wake();
    }
  }

  bool everyone_is_here() const { return control_->epoch.load(std::memory_order_acquire) == target_; }

  Status wait_here(double seconds) {
    for (int k = 0; k < spins_; k++) {
      if (everyone_is_here()) return compare();
      pause_core();
    }
    for (int k = 0; k < yields_; k++) {
      if (everyone_is_here()) return compare();
      sched_yield();
    }
    const std::uint64_t deadline = now_ns() + std::uint64_t(seconds * 1e9);
    while (!everyone_is_here()) {
      if (control_->broken.load()) return Status::broken;
      const std::uint64_t now = now_ns();
      if (now >= deadline) return Status::waiting;
      const timespec left = {time_t((deadline - now) / 1000000000u), long((deadline - now) % 1000000000u)};
      control_->sleepers.fetch_add(1, std::memory_order_seq_cst);
      futex(&control_->epoch, FUTEX_WAIT, target_ - 1, &left);
      control_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
      // Woken early by a rank that left or gave up: the caller finds out which.
      if (!everyone_is_here() && someone_left()) return control_->broken.load() ? Status::broken : Status::waiting;
    }
    return compare();
  }

  bool someone_left() const {
    for (int r = 0; r < size_; r++)
      if (slots_[r].state.load() == 2 && slots_[r].arrived.load() != target_) return true;
    return control_->broken.load() != 0;
  }

  Status compare() const {
    // A rank that comes late completes the meeting, but those it meets have given up and gone.
    if (control_->broken.load(std::memory_order_acquire)) return Status::broken;
    if (comparing_)
      for (int r = 0; r < size_; r++)
        if (std::memcmp(call(r).header, call(rank_).header, kAgreedBytes) != 0) return Status::disagree;
    return Status::met;
  }

  const Call& call(int rank) const { return slots_[rank].calls[turn_]; }

  void wake() { futex(&control_->epoch, FUTEX_WAKE, INT_MAX, nullptr); }

  char* mapped(const Location& location) const {
    const std::uintptr_t base = windows_.at(std::size_t(location.window));
    if (base == 0) throw std::runtime_error("Expected a window that this rank has mapped, got one that it freed.");
    return reinterpret_cast<char*>(base + location.offset);
  }

  struct Numbers {
    Dtype dtype;
    Reduction reduction;
    std::size_t width;
  };

  template <typename Body>
  static void for_blocks(std::uint64_t numel, std::size_t block, Body body) {
    for (std::uint64_t done = 0; done < numel; done += block)
      body(done, std::size_t(numel - done < block ? numel - done : block));
  }

  // Reduce elements [first, first + numel) of every rank's source into `result`; at most a block, if one is private.
  void reduce_piece(const Numbers& numbers, std::uint64_t first, std::size_t numel, char* result) {
    const std::uint64_t byte = first * numbers.width;
    for (int r = 0; r < size_; r++) {
      const Location& source = call(r).source;
      if (source.window != kPrivate) {
        sources_[std::size_t(r)] = mapped(source) + byte;
      } else if (r == rank_) {
        sources_[std::size_t(r)] = own_source() + byte;
      } else {
        scratch_.resize(kBlockBytes * std::size_t(size_));
        char* copy = scratch_.data() + std::size_t(r) * kBlockBytes;
        read(r, source, byte, copy, numel * numbers.width);
        sources_[std::size_t(r)] = copy;
      }
    }
    reduce(numbers.dtype, numbers.reduction, result, sources_.data(), sources_.size(), numel);
  }

  const char* own_source() const {
    const Location& source = call(rank_).source;
    return source.window != kPrivate ? mapped(source) : reinterpret_cast<const char*>(source.offset);
  }

  void read(int rank, const Location& from, std::uint64_t first, char* to, std::size_t nbytes) const {
    if (nbytes == 0) return;
    if (from.window != kPrivate || rank == rank_) {
      const char* source = from.window != kPrivate ? mapped(from) : reinterpret_cast<const char*>(from.offset);
      if (source + first != to) copy_bytes(to, source + first, nbytes);
      return;
    }
    while (nbytes > 0) {
      iovec local = {to, nbytes};
      iovec remote = {reinterpret_cast<void*>(from.offset + first), nbytes};
      const ssize_t got = process_vm_readv(pid_t(slots_[rank].pid), &local, 1, &remote, 1, 0);
      if (got <= 0)
        throw std::runtime_error("process_vm_readv from rank " + std::to_string(rank) + " failed: " +
                                 std::strerror(errno) + ". Set ZERORT_CROSS_MEMORY=0 to stage through shared memory.");
      to += got;
      first += std::uint64_t(got);
      nbytes -= std::size_t(got);
    }
  }

  Control* control_;
  Slot* slots_;
  int rank_, size_, spins_, yields_;
  std::uint32_t target_ = 0;             // the epoch that this rank waits for
  std::uint32_t turn_ = 0;               // which of the two calls in a slot belongs to the current meeting
  bool comparing_ = false;               // whether the current wait ends with a comparison of the calls
  std::vector<std::uintptr_t> windows_;  // where this process has mapped each window
  std::vector<const void*> sources_;     // one per rank, of the piece being reduced
  std::vector<char> scratch_;            // copies of peers' private memory, a block for each rank
  alignas(kCacheLine) char tile_[kTileBytes];
};

// Let any process of this user read this one's memory, where Yama would only allow an ancestor. Refused elsewhere: harmless.
void allow_readers() {
#ifdef PR_SET_PTRACER
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
#endif
}

// Try to read eight bytes of another process, and see whether they are the expected ones.
bool probe_reading(int pid, std::uint64_t address, std::uint64_t expected) {
  std::uint64_t value = 0;
  iovec local = {&value, sizeof value}, remote = {reinterpret_cast<void*>(address), sizeof value};
  return process_vm_readv(pid, &local, 1, &remote, 1, 0) == ssize_t(sizeof value) && value == expected;
}

}  // namespace

void bind_rendezvous(nb::module_& module) {
  nb::class_<Rendezvous>(module, "Rendezvous")
      .def(nb::init<std::uintptr_t, int, int, int, int>(), nb::arg("control"), nb::arg("rank"), nb::arg("size"),
           nb::arg("spins"), nb::arg("yields"))
      .def("map_window", &Rendezvous::map_window)
      .def("unmap_window", &Rendezvous::unmap_window)
      .def("meet", [](Rendezvous& self, nb::bytes header, std::int64_t source_window, std::uint64_t source_offset,
                      std::int64_t out_window, std::uint64_t out_offset, double seconds) {
             return int(self.meet(header, source_window, source_offset, out_window, out_offset, seconds));
           })
      .def("part", [](Rendezvous& self, double seconds) { return int(self.part(seconds)); })
      .def("wait", [](Rendezvous& self, double seconds) { return int(self.wait(seconds)); })
      .def("give_up", &Rendezvous::give_up)
      .def("leave", &Rendezvous::leave)
      .def("reduce_sources", &Rendezvous::reduce_sources)
      .def("reduce_into_all", &Rendezvous::reduce_into_all)
      .def("copy_from_source", &Rendezvous::copy_from_source)
      .def("copy_from_out", &Rendezvous::copy_from_out)
      .def("sources_in_windows", &Rendezvous::sources_in_windows)
      .def("outs_in_windows", &Rendezvous::outs_in_windows)
      .def("all_sources_in", &Rendezvous::all_sources_in)
      .def("one_out", &Rendezvous::one_out);
  module.def("allow_readers", &allow_readers);
  module.def("probe_reading", &probe_reading);
}

}  // namespace zerort
