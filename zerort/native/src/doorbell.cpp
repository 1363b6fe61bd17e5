// Doorbell: how a worker thread waits for work that the one that rings may well do itself.
//
// A Python thread that is woken needs the GIL before it can even find that there is nothing left to do, and takes it from the
// thread that is at work. So the worker waits here, without the GIL, and after the bell has rung waits a little longer: only
// work that is still there then is for it.
#include <atomic>
#include <cerrno>
#include <cstdint>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace zerort {
namespace {

class Doorbell {
 public:
  // There is one piece of work more.
  void ring() {
    if (pending_.fetch_add(1) == 0) futex(FUTEX_WAKE_PRIVATE, 1);
  }

  // Someone has taken a piece.
  void answer() { pending_.fetch_sub(1); }

  // Sleep until there is work that nobody has taken within `grace` seconds.
  void wait(double grace) {
    nb::gil_scoped_release release;
    do {
      while (pending_.load() == 0) futex(FUTEX_WAIT_PRIVATE, 0);
      timespec left = {0, long(grace * 1e9)};
      while (left.tv_nsec > 0 && nanosleep(&left, &left) != 0 && errno == EINTR) {
      }
    } while (pending_.load() == 0);
  }

 private:
  void futex(int operation, std::uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&pending_), operation, value, nullptr, nullptr, 0);
  }

  std::atomic<std::uint32_t> pending_{0};
};

}  // namespace

void bind_doorbell(nb::module_& module) {
  nb::class_<Doorbell>(module, "Doorbell")
      .def(nb::init<>())
      .def("ring", &Doorbell::ring)
      .def("answer", &Doorbell::answer)
      .def("wait", &Doorbell::wait);
}

}  // namespace zerort
