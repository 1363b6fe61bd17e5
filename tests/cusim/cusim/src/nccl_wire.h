// NCCL's wire: what the processes of one communicator share, and how they wait for each other without hanging.
//
// Shared memory holds a slot per rank (the call it is in, a chunk of data) and a box per pair of ranks (a chunk on its way
// from one to the other). Every wait ends: by success, by this rank's abort, by a rank that has ended, by two calls that do not
// belong together, or by CUSIM_NCCL_TIMEOUT; all but the first are reported with the calls of all ranks.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace cusim::nccl {

enum Result : int {  // the numbers of ncclResult_t
  kOk = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

enum class Verb : int { kNothing, kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce, kSend, kReceive, kSplit };

struct Call {  // what a rank asked for; equal on all ranks of a collective
  Verb verb = Verb::kNothing;
  int type = 0;       // ncclDataType_t
  int reduction = 0;  // ncclRedOp_t
  int root = 0;       // or the peer of a send or a receive
  uint64_t count = 0;

  bool collective() const { return verb != Verb::kNothing && verb != Verb::kSend && verb != Verb::kReceive; }
  bool operator==(const Call &other) const {
    return verb == other.verb && type == other.type && reduction == other.reduction && root == other.root && count == other.count;
  }
};

std::string describe(const Call &call);  // "AllReduce(1000 x float32, sum)"
size_t type_size(int type);              // 0: no such type

constexpr size_t kChunk = 256 << 10;

struct Slot {
  pid_t process;
  Call call;                      // that its rank is in
  Call failed_call;               // that it was in when someone found two calls that do not belong together
  std::atomic<uint64_t> waits_for;  // bit r: a send to or a receive from rank r is not done
  int color, key;                 // of a split
  std::atomic<int> destroys;      // its communicator, and waits for the others to do so
  alignas(64) char data[kChunk];
};

struct Box {
  std::atomic<uint64_t> filled, emptied;  // chunks
  std::atomic<int> refused;
  Call send, receive;
  uint64_t bytes;
  alignas(64) char data[kChunk];
};

// The name of a new communicator's shared memory. Removes what processes left behind that ended before all ranks had joined.
std::string new_wire_name();

class Wire {
 public:
  // Null: the shared memory cannot be had.
  static std::unique_ptr<Wire> open(const std::string &name, int size, int rank);
  ~Wire();

  const std::string name;
  const int size, rank;

  Slot &slot(int rank) const;
  Slot &mine() const { return slot(rank); }
  Box &box(int from, int to) const;

  bool join();     // waits until all ranks have come
  bool barrier();
  void leave();    // waits until all ranks of other processes leave, too, or have ended: not for those that abort
  bool wait(const std::function<bool()> &ready);  // false: failed, see error()
  void abort();                                   // this rank alone, as NCCL does: the others wait on
  void fail(int result, const std::string &why);  // this rank alone; all of them find out by themselves
  int error() const;

 private:
  struct Header;
  Wire(const std::string &name, int size, int rank, char *memory, size_t length)
      : name(name), size(size), rank(rank), memory_(memory), length_(length) {}
  Header &header() const;
  bool look_round(double waited);
  std::string everyone() const;
  bool calls_conflict() const;

  char *memory_;
  size_t length_;
  std::atomic<int> error_{kOk};
};

}  // namespace cusim::nccl
