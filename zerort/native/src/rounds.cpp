// zerort.native._kernels.Rounds: see rounds.h.
#include "rounds.h"

#include <cstring>
#include <stdexcept>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "meeting.h"

namespace nb = nanobind;

namespace zerort {

void Ahead::send(std::uint64_t call) {
  take_back();  // there is nothing, but of a call that was left halfway
  call_ = call;
  for (const auto& round : rounds_) {
    Messages& messages = under_way_.emplace_back(post_);
    messages.turn_to(call);
    for (const Message& one : round) messages.send(one.rank, Sockets::data_of(call), one.from, one.nbytes);
  }
}

std::optional<Messages> Ahead::take(std::uint64_t call) {
  if (call_ != call || under_way_.empty()) return std::nullopt;
  std::optional<Messages> first(std::move(under_way_.front()));
  under_way_.pop_front();
  return first;
}

void Ahead::take_back() {
  for (Messages& messages : under_way_) messages.take_back();
  under_way_.clear();
}

void Rounds::begin(std::uint64_t call) {
  if (!under_way_.empty()) throw std::runtime_error("Expected rounds that have ended, got some that are under way.");
  call_ = call;
  done_ = 0;
}

bool Rounds::wait(std::size_t until, double seconds, double busy) {
  const std::uint64_t began = now_ns();
  while (done_ < until) {
    while (under_way_.size() < depth_ && done_ + under_way_.size() < rounds_.size()) start(rounds_[done_ + under_way_.size()]);
    const double waited = double(now_ns() - began) * 1e-9;
    if (waited >= seconds || !under_way_.front().wait(seconds - waited, busy - waited)) return false;
    under_way_.pop_front();
    finish(rounds_[done_++]);
  }
  return true;
}

void Rounds::start(const Round& round) {
  std::optional<Messages> sent = ahead_ ? ahead_->take(call_) : std::nullopt;
  Messages& messages = under_way_.emplace_back(sent ? std::move(*sent) : Messages(post_));
  messages.turn_to(call_);
  const Sockets::Tag tag = Sockets::data_of(call_);
  for (const Message& one : round.receives) messages.receive(one.rank, tag, one.at, one.nbytes, one.nbytes);
  if (sent) return;
  for (const Message& one : round.sends) messages.send(one.rank, tag, one.at, one.nbytes);
}

void Rounds::finish(const Round& round) const {
  for (const Copy& one : round.copies) std::memcpy(one.to, one.from, one.nbytes);
}

namespace {

using Part = std::tuple<int, std::uintptr_t, std::size_t>;             // rank, address, bytes
using Copied = std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>;  // to, from, bytes
using Given = std::tuple<std::vector<Part>, std::vector<Part>, std::vector<Copied>>;

std::vector<Rounds::Message> messages_of(const std::vector<Part>& parts) {
  std::vector<Rounds::Message> found;
  for (const auto& [rank, address, nbytes] : parts) found.push_back({rank, reinterpret_cast<char*>(address), nbytes});
  return found;
}

void open(Rounds* self, const Post& post, const std::vector<Given>& given, std::size_t depth, std::shared_ptr<Ahead> ahead) {
  std::vector<Rounds::Round> rounds;
  for (const auto& [sends, receives, copies] : given) {
    rounds.push_back({messages_of(sends), messages_of(receives), {}});
    for (const auto& [to, from, nbytes] : copies)
      rounds.back().copies.push_back({reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), nbytes});
  }
  new (self) Rounds(post, depth, std::move(rounds), std::move(ahead));
}

void aim(Ahead& self, std::uintptr_t array, const std::vector<std::vector<Part>>& rounds) {
  std::vector<std::vector<Ahead::Message>> found;
  for (const std::vector<Part>& sends : rounds) {
    found.emplace_back();
    for (const auto& [rank, address, nbytes] : sends)
      found.back().push_back({rank, reinterpret_cast<const char*>(address), nbytes});
  }
  self.aim(reinterpret_cast<const char*>(array), std::move(found));
}

bool wait(Rounds& self, std::size_t until, double seconds, double busy) {
  const nb::gil_scoped_release release;
  return self.wait(until, seconds, busy);
}

}  // namespace

void bind_rounds(nb::module_& module) {
  nb::class_<Ahead>(module, "Ahead")
      .def(nb::init<const Post&>())
      .def("aim", &aim)
      .def_prop_ro("call", &Ahead::call)
      .def("take_back", &Ahead::take_back);
  nb::class_<Rounds>(module, "Rounds")
      .def("__init__", &open, nb::arg("post"), nb::arg("rounds"), nb::arg("depth"), nb::arg("ahead").none())
      .def("begin", &Rounds::begin)
      .def_prop_ro("done", &Rounds::done)
      .def("wait", &wait);
}

}  // namespace zerort
