// zerort.native._kernels.Rendezvous: meeting and moving, step by step, as Python calls them. See meeting.h and peers.h; the
// same verbs, in Python, are in zerort/native/rendezvous.py.
#include <stdexcept>

#include <sys/prctl.h>
#include <sys/uio.h>

#include <nanobind/nanobind.h>

#include "peers.h"

namespace nb = nanobind;

namespace zerort {
namespace {

int meet(Peers& self, nb::bytes header, std::int64_t source_window, std::uint64_t source_offset,
         std::int64_t out_window, std::uint64_t out_offset, double seconds) {
  if (header.size() != kHeaderBytes) throw std::invalid_argument("Expected a packed header of the agreed size.");
  self.show(header.c_str(), {source_window, source_offset}, {out_window, out_offset});
  const nb::gil_scoped_release release;
  self.arrive(true);
  return int(self.wait(seconds));
}

int part(Peers& self, double seconds) {
  const nb::gil_scoped_release release;
  self.arrive(false);
  return int(self.wait(seconds));
}

int wait(Peers& self, double seconds) {
  const nb::gil_scoped_release release;
  return int(self.wait(seconds));
}

void reduce_sources(Peers& self, std::uintptr_t out, int dtype, int reduction, std::uint64_t first,
                    std::uint64_t numel) {
  const nb::gil_scoped_release release;
  self.reduce_sources(reinterpret_cast<char*>(out), Dtype(dtype), Reduction(reduction), first, numel);
}

void reduce_into_all(Peers& self, int dtype, int reduction, std::uint64_t first, std::uint64_t numel) {
  const nb::gil_scoped_release release;
  self.reduce_into_all(Dtype(dtype), Reduction(reduction), first, numel);
}

void copy_from_source(const Peers& self, int rank, std::uint64_t first, std::uintptr_t to, std::uint64_t nbytes) {
  const nb::gil_scoped_release release;
  self.copy_from_source(rank, first, reinterpret_cast<char*>(to), nbytes);
}

void copy_from_out(const Peers& self, int rank, std::uint64_t first, std::uintptr_t to, std::uint64_t nbytes) {
  const nb::gil_scoped_release release;
  self.copy_from_out(rank, first, reinterpret_cast<char*>(to), nbytes);
}

// Let any process of this user read this one's memory, where Yama would only allow an ancestor, or take that back. Refused
// elsewhere: harmless.
void allow_readers(bool allowed) {
#ifdef PR_SET_PTRACER
  prctl(PR_SET_PTRACER, allowed ? PR_SET_PTRACER_ANY : 0, 0, 0, 0);
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
  nb::class_<Peers>(module, "Rendezvous")
      .def(nb::init<std::uintptr_t, int, int, int, int>())
      .def("map_window", &Peers::map_window)
      .def("unmap_window", &Peers::unmap_window)
      .def("meet", &meet)
      .def("part", &part)
      .def("wait", &wait)
      .def("give_up", &Peers::give_up)
      .def("leave", &Peers::leave)
      .def("reduce_sources", &reduce_sources)
      .def("reduce_into_all", &reduce_into_all)
      .def("copy_from_source", &copy_from_source)
      .def("copy_from_out", &copy_from_out)
      .def("sources_in_windows", &Peers::sources_in_windows)
      .def("outs_in_windows", &Peers::outs_in_windows)
      .def("all_sources_in", &Peers::all_sources_in)
      .def("one_out", &Peers::one_out)
      .def_rw("half", &Peers::half);
  module.def("allow_readers", &allow_readers, nb::arg("allowed"));
  module.def("probe_reading", &probe_reading);
}

}  // namespace zerort
