// zerort.native._kernels.Messages: see wire.h. The same in Python, over mpi4py's requests, is in
// zerort/comm/transports/messages/wire.py.
#include "wire.h"

#include <cassert>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include <sys/prctl.h>
#include <time.h>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "meeting.h"

namespace nb = nanobind;

namespace zerort {
namespace {

// Seconds of looking again at once: on a fast network the message is there by then.
constexpr double kSpin = 20e-6;

// A nap is that part of the time waited until then: what it adds to the wait is little, and so are the looks.
constexpr double kPartOfWait = 8;
constexpr long kLongestNapNs = 50000;

// Seconds of naps before the kernel is asked to wake this rank: that takes longer than a small message.
constexpr double kNapFor = 500e-6;

// Sleeps that end when they should. Not sched_yield: who yields again and again falls behind whoever computes on the same core,
// by milliseconds when the message has come, and one that sleeps does not. By default Linux rounds sleeps up by 50 µs.
class ShortNaps {
 public:
  ~ShortNaps() {
    if (slack_ > 0) prctl(PR_SET_TIMERSLACK, slack_, 0, 0, 0);
  }

  void sleep(long ns) {
    if (slack_ == 0) {
      slack_ = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
      prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    }
    const timespec nap = {0, ns < kLongestNapNs ? ns : kLongestNapNs};
    nanosleep(&nap, nullptr);
  }

 private:
  long slack_ = 0;  // of this thread, as it was
};

template <typename Handle>
Handle handle_of(std::uintptr_t value) {
  if constexpr (sizeof(Handle) == sizeof(int))
    return Handle(std::intptr_t(value));
  else
    return reinterpret_cast<Handle>(value);
}

void expect_success(int code) {
  if (code != 0) throw std::runtime_error("Expected MPI to carry a message, got its error " + std::to_string(code) + ".");
}

template <typename Handle>
void start_send(const MpiLibrary& mpi, int rank, int tag, const void* from, int nbytes, Handle* request) {
  using Isend = int (*)(const void*, int, Handle, int, int, Handle, Handle*);
  expect_success(reinterpret_cast<Isend>(mpi.isend)(from, nbytes, handle_of<Handle>(mpi.byte), rank, tag,
                                                    handle_of<Handle>(mpi.comm), request));
}

template <typename Handle>
void start_receive(const MpiLibrary& mpi, int rank, int tag, void* to, int nbytes, Handle* request) {
  using Irecv = int (*)(void*, int, Handle, int, int, Handle, Handle*);
  expect_success(reinterpret_cast<Irecv>(mpi.irecv)(to, nbytes, handle_of<Handle>(mpi.byte), rank, tag,
                                                    handle_of<Handle>(mpi.comm), request));
}

template <typename Handle>
bool test_all(const MpiLibrary& mpi, int count, void* requests, void* statuses) {
  using Testall = int (*)(int, Handle*, int*, void*);
  int done = 0;
  expect_success(reinterpret_cast<Testall>(mpi.testall)(count, static_cast<Handle*>(requests), &done, statuses));
  return done != 0;
}

// MPI hears in order what was sent in order, and carries no data of calls that are not made: a kind is enough.
int mpi_tag_of(Sockets::Tag tag) { return tag == Sockets::kGreeting ? int(tag) : 0; }

}  // namespace

Messages::Messages(const Post& post) : post_(post), pending_(std::make_shared<std::atomic<std::size_t>>(0)) {
  const MpiLibrary& mpi = post.mpi;
  if (mpi.handle_nbytes != sizeof(int) && mpi.handle_nbytes != sizeof(void*))
    throw std::invalid_argument("Expected handles of MPI that are integers or pointers.");
}

template <typename Handle>
Handle* Messages::add() {
  const std::size_t words = ((count_ + 1) * sizeof(Handle) + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t);
  if (requests_.size() < words) requests_.resize(words);
  return reinterpret_cast<Handle*>(requests_.data()) + count_;
}

void Messages::send(int rank, Tag tag, const void* from, std::size_t nbytes) {
  if (on_sockets(rank)) {
    post_.sockets->send(rank, tag, from, nbytes, pending_);
    return;
  }
  if (post_.mpi.handle_nbytes == sizeof(int))
    start_send(post_.mpi, rank, mpi_tag_of(tag), from, int(nbytes), add<int>());
  else
    start_send(post_.mpi, rank, mpi_tag_of(tag), from, int(nbytes), add<void*>());
  count_++;
}

void Messages::receive(int rank, Tag tag, void* to, std::size_t room, std::size_t likely_nbytes) {
  if (on_sockets(rank)) {
    receive(rank, tag, {{static_cast<char*>(to), room}}, likely_nbytes);
    return;
  }
  if (post_.mpi.handle_nbytes == sizeof(int))
    start_receive(post_.mpi, rank, mpi_tag_of(tag), to, int(room), add<int>());
  else
    start_receive(post_.mpi, rank, mpi_tag_of(tag), to, int(room), add<void*>());
  count_++;
}

void Messages::receive(int rank, Tag tag, std::vector<Sockets::Room> rooms, std::size_t likely_nbytes) {
  assert(on_sockets(rank));
  post_.sockets->receive(rank, tag, std::move(rooms), likely_nbytes, pending_);
}

bool Messages::test() {
  if (*pending_ != 0) post_.sockets->progress(pending_);
  return test_mpi() && *pending_ == 0;
}

bool Messages::test_mpi() {
  if (count_ == 0) return true;
  statuses_.resize((count_ * post_.mpi.status_nbytes + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t));
  const bool done = post_.mpi.handle_nbytes == sizeof(int)
                        ? test_all<int>(post_.mpi, int(count_), requests_.data(), statuses_.data())
                        : test_all<void*>(post_.mpi, int(count_), requests_.data(), statuses_.data());
  if (done) count_ = 0;
  return done;
}

bool Messages::wait(double seconds, double busy) {
  const std::uint64_t began = now_ns();
  ShortNaps naps;
  while (!test()) {
    const double waited = double(now_ns() - began) * 1e-9;
    if (waited >= seconds) return false;
    if (waited < kSpin && busy > 0) continue;
    if (count_ == 0 && (busy <= 0 || waited >= kNapFor)) {
      post_.sockets->sleep(pending_, seconds - waited);  // the kernel wakes it
      continue;
    }
    naps.sleep(waited < busy ? long(waited * 1e9 / kPartOfWait) : kLongestNapNs);
  }
  return true;
}

namespace {

using Part = std::tuple<int, std::uintptr_t, std::size_t>;  // rank, address, bytes

void start(Messages& self, const std::vector<Part>& sends, const std::vector<Part>& receives, std::int64_t call, bool is_greeting) {
  const nb::gil_scoped_release release;
  const Sockets::Tag tag = is_greeting ? Sockets::kGreeting : Sockets::data_of(std::uint64_t(call));
  self.turn_to(std::uint64_t(call));
  for (const auto& [rank, address, room] : receives)
    self.receive(rank, tag, reinterpret_cast<void*>(address), room, is_greeting ? 0 : room);
  for (const auto& [rank, address, nbytes] : sends) self.send(rank, tag, reinterpret_cast<const void*>(address), nbytes);
}

bool wait(Messages& self, double seconds, double busy) {
  const nb::gil_scoped_release release;
  return self.wait(seconds, busy);
}

void open_sockets(Sockets* self, int rank, nb::bytes token, int listener,
                  const std::vector<std::tuple<int, std::uint32_t, std::uint16_t>>& peers) {
  Sockets::Token secret;
  if (token.size() != secret.size()) throw std::invalid_argument("Expected a token of 16 bytes.");
  std::memcpy(secret.data(), token.c_str(), secret.size());
  std::vector<Sockets::Peer> others;
  for (const auto& [other, address, port] : peers) others.push_back({other, address, port});
  new (self) Sockets(rank, secret, listener, others);
}

}  // namespace

void bind_wire(nb::module_& module) {
  nb::class_<MpiLibrary>(module, "MpiLibrary")
      .def(
          "__init__",
          [](MpiLibrary* self, std::uintptr_t isend, std::uintptr_t irecv, std::uintptr_t testall, std::size_t handle_nbytes,
             std::size_t status_nbytes, std::uintptr_t comm, std::uintptr_t byte) {
            new (self) MpiLibrary{isend, irecv, testall, handle_nbytes, status_nbytes, comm, byte};
          },
          nb::arg("isend"), nb::arg("irecv"), nb::arg("testall"), nb::arg("handle_nbytes"), nb::arg("status_nbytes"),
          nb::arg("comm"), nb::arg("byte"));
  nb::class_<Sockets>(module, "Sockets")
      .def("__init__", &open_sockets, nb::arg("rank"), nb::arg("token"), nb::arg("listener"), nb::arg("peers"))
      .def("round_trip", &Sockets::round_trip)
      .def("limit_buffers", &Sockets::limit_buffers)
      .def("go_far", &Sockets::go_far)
      .def("close", &Sockets::close);
  nb::class_<Post>(module, "Post")
      .def(
          "__init__",
          [](Post* self, const MpiLibrary& mpi, std::shared_ptr<Sockets> sockets) { new (self) Post{mpi, std::move(sockets)}; },
          nb::arg("mpi"), nb::arg("sockets").none())
      .def_ro("mpi", &Post::mpi);
  nb::class_<Messages>(module, "Messages")
      .def(nb::init<const Post&>())
      .def("start", &start, nb::arg(), nb::arg(), nb::arg("call"), nb::arg("is_greeting"))
      .def("wait", &wait);
}

}  // namespace zerort
