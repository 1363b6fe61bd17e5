// zerort.native._kernels.CallLog and PreparedCall: collectives of one host that are made again (prepared.h, shortcut.h).
#include <memory>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "prepared.h"
#include "shortcut.h"

namespace nb = nanobind;

namespace zerort {
namespace {

using PreparedCall = Prepared<Shortcut<WithoutGil>>;

void make_prepared(PreparedCall* self, Peers& peers, CallLog& log, nb::object facts, nb::bytes tail, nb::handle source,
                   nb::handle out, Place source_place, Place out_place, std::uint64_t slab_nbytes, int move,
                   std::vector<Range> takes, std::vector<std::uint64_t> places, bool alike, std::size_t width, int dtype,
                   int reduction, std::uint64_t whole_nbytes, bool anywhere, nb::object make, nb::object weak_references) {
  new (self) PreparedCall(
      log, std::move(facts), source, out, anywhere, width, std::move(make), std::move(weak_references), peers,
      Route{route_base(source_place, out_place, slab_nbytes, move, alike, width, dtype, reduction), std::move(takes),
            std::move(places), whole_nbytes},
      tail_of(tail));
}

}  // namespace

void bind_prepared(nb::module_& module) {
  nb::class_<CallLog>(module, "CallLog").def(nb::init<std::size_t>()).def("rows", &CallLog::rows);
  nb::class_<PreparedCall>(module, "PreparedCall")
      .def("__init__", &make_prepared, nb::arg("link"), nb::arg("log"), nb::arg("facts"), nb::arg("tail"),
           nb::arg("source").none(), nb::arg("out").none(), nb::arg("source_place"), nb::arg("out_place"),
           nb::arg("slab_nbytes"), nb::arg("move"), nb::arg("takes"), nb::arg("places"), nb::arg("alike"), nb::arg("width"),
           nb::arg("dtype"), nb::arg("reduction"), nb::arg("whole_nbytes"), nb::arg("anywhere"), nb::arg("make").none(),
           nb::arg("weak_references"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("run", &PreparedCall::run, nb::arg(), nb::arg().none(), nb::arg().none())
      .def("run_new", &PreparedCall::run_new, nb::arg(), nb::arg());
}

}  // namespace zerort
