// zerort.native._kernels.HostsCall: small collectives between hosts that are made again (prepared.h, hosts.h).
#include "hosts.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "prepared.h"

namespace nb = nanobind;

namespace zerort {
namespace {

using HostsCall = Prepared<HostsShortcut<WithoutGil>>;
using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

Greeting::Plan make_plan(const Post& post, std::vector<int> ranks, std::size_t me, bool direct, std::uintptr_t messages,
                         std::size_t stride, std::size_t nbytes, std::size_t most, nb::bytes digest, std::uint64_t places,
                         std::uintptr_t parts) {
  Greeting::Plan plan = {post,   std::move(ranks), me, direct, reinterpret_cast<char*>(messages), stride, nbytes, most, {},
                         places, reinterpret_cast<char*>(parts)};
  if (digest.size() != sizeof plan.digest) throw std::invalid_argument("Expected a digest of 16 bytes.");
  std::memcpy(plan.digest, digest.c_str(), sizeof plan.digest);
  return plan;
}

void make_call(HostsCall* self, Peers& peers, CallLog& log, nb::object facts, nb::bytes tail, nb::handle source, nb::handle out,
               Place source_place, Place out_place, std::uint64_t slab_nbytes, int move, bool alike, std::size_t whole_nbytes,
               std::size_t first, std::size_t width, int dtype, int reduction, std::uintptr_t notes, bool anywhere,
               std::uint64_t places, const Greeting::Plan* plan, std::vector<nb::bytes> tails, std::vector<Pairs> shards,
               std::size_t host, bool scattered, double patience, double busy, std::shared_ptr<Ahead> ahead, nb::object make,
               nb::object weak_references) {
  HostsRoute route = {route_base(source_place, out_place, slab_nbytes, move, alike, width, dtype, reduction),
                      whole_nbytes,
                      first,
                      reinterpret_cast<char*>(notes),
                      places,
                      patience,
                      busy,
                      std::move(ahead),
                      {},
                      {},
                      scattered,
                      host};
  for (const nb::bytes& one : tails) route.tails.emplace_back(one.c_str(), one.c_str() + one.size());
  for (const Pairs& of_host : shards) {
    route.shards.emplace_back();
    for (const auto& [place, nbytes] : of_host) route.shards.back().push_back({place, nbytes});
  }
  new (self) HostsCall(log, std::move(facts), source, out, anywhere, width, std::move(make), std::move(weak_references), peers,
                       std::move(route), tail_of(tail), plan == nullptr ? std::nullopt : std::optional(*plan));
}

}  // namespace

void bind_hosts(nb::module_& module) {
  nb::class_<Greeting::Plan>(module, "GreetingPlan")
      .def(
          "__init__", [](Greeting::Plan* self, const Post& post, std::vector<int> ranks, std::size_t me, bool direct,
                         std::uintptr_t messages, std::size_t stride, std::size_t nbytes, std::size_t most,
                         nb::bytes digest, std::uint64_t places, std::uintptr_t parts) {
            new (self) Greeting::Plan(
                make_plan(post, std::move(ranks), me, direct, messages, stride, nbytes, most, digest, places, parts));
          },
          nb::arg("post"), nb::arg("ranks"), nb::arg("me"), nb::arg("direct"), nb::arg("messages"), nb::arg("stride"),
          nb::arg("nbytes"), nb::arg("most"), nb::arg("digest"), nb::arg("places"), nb::arg("parts"));
  nb::class_<HostsCall>(module, "HostsCall")
      .def("__init__", &make_call, nb::arg("link"), nb::arg("log"), nb::arg("facts"), nb::arg("tail"),
           nb::arg("source").none(), nb::arg("out").none(), nb::arg("source_place"), nb::arg("out_place"),
           nb::arg("slab_nbytes"), nb::arg("move"), nb::arg("alike"), nb::arg("whole_nbytes"), nb::arg("first"),
           nb::arg("width"), nb::arg("dtype"), nb::arg("reduction"), nb::arg("notes"), nb::arg("anywhere"),
           nb::arg("places"), nb::arg("plan").none(), nb::arg("tails"), nb::arg("shards"), nb::arg("host"),
           nb::arg("scattered"), nb::arg("patience"), nb::arg("busy"), nb::arg("ahead").none(),
           nb::arg("make").none(), nb::arg("weak_references"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("run", &HostsCall::run, nb::arg(), nb::arg().none(), nb::arg().none())
      .def("run_new", &HostsCall::run_new, nb::arg(), nb::arg())
      .def("wait", [](HostsCall& self, double seconds, double busy) { return self.way().wait(seconds, busy); })
      .def("hear", [](HostsCall& self) { return self.way().hear(); })
      .def("flags", [](HostsCall& self) { return self.way().flags(); })
      .def("deliver", [](HostsCall& self) { self.way().deliver(); })
      .def_prop_rw(
          "listen_at", [](HostsCall& self) { return self.way().listen_at; },
          [](HostsCall& self, std::uint64_t at) { self.way().listen_at = at; });
}

}  // namespace zerort
