// zerort.native._kernels.Doorbell: see doorbell.h. The same verbs, in Python, are in zerort/native/doorbell.py.
#include <nanobind/nanobind.h>

#include "doorbell.h"

namespace nb = nanobind;

namespace zerort {

void bind_doorbell(nb::module_& module) {
  nb::class_<Doorbell>(module, "Doorbell")
      .def(nb::init<double>())
      .def("ring", &Doorbell::ring)
      .def("answer", &Doorbell::answer)
      .def("recount", &Doorbell::recount)
      .def("wait", &Doorbell::wait, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace zerort
