// Wire: messages between hosts, handed to MPI or to sockets, and waited for without the GIL.
//
// MPI is found at run time, in whatever library mpi4py has loaded: three functions by their addresses, and handles as that
// library has them, integers or pointers. Touches no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "sockets.h"

namespace zerort {

struct MpiLibrary {
  std::uintptr_t isend, irecv, testall;  // addresses of functions
  std::size_t handle_nbytes;             // of a communicator, a datatype, a request: 4 (an int) or 8 (a pointer)
  std::size_t status_nbytes;
  std::uintptr_t comm, byte;  // handles of the communicator and of MPI_BYTE
};

// Who carries messages: sockets to the ranks that they know, MPI to all others.
struct Post {
  MpiLibrary mpi;
  std::shared_ptr<Sockets> sockets;  // or none
};

// Messages that are under way together. Their memory must live until `wait` has said that they are done.
class Messages {
 public:
  using Tag = Sockets::Tag;

  explicit Messages(const Post& post);

  // What follows is for the call with this number.
  void turn_to(std::uint64_t call) const {
    if (post_.sockets) post_.sockets->turn_to(call);
  }

  void send(int rank, Tag tag, const void* from, std::size_t nbytes);
  // A message of the likely length, or of another that fits; 0: nobody knows.
  void receive(int rank, Tag tag, void* to, std::size_t room, std::size_t likely_nbytes);
  // The same into several rooms, in order, if the rank is on sockets.
  void receive(int rank, Tag tag, std::vector<Sockets::Room> rooms, std::size_t likely_nbytes);
  bool on_sockets(int rank) const { return post_.sockets && post_.sockets->carries(rank); }

  // Wait up to `seconds`; true if all have gone and come. For the first `busy` seconds naps between looks are short, then long: a
  // long message needs this rank seldom, and whoever computes needs the core.
  bool wait(double seconds, double busy);

  // Send no more of what sockets have not sent yet: the memory of that is free.
  void take_back() {
    if (post_.sockets) post_.sockets->take_back(pending_);
  }

 private:
  template <typename Handle>
  Handle* add();
  bool test();
  bool test_mpi();

  Post post_;
  Sockets::Pending pending_;  // of sockets
  std::size_t count_ = 0;     // of MPI
  std::vector<std::uint64_t> requests_;  // as many handles as fit
  std::vector<std::uint64_t> statuses_;
};

}  // namespace zerort
