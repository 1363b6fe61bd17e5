// NCCL's API: communicators, groups, and calls that become operations of a stream.
#include <cstdio>
#include <cstring>
#include <vector>

#include "device.h"
#include "memory.h"
#include "nccl_order.h"
#include "nccl_transfer.h"
#include "nccl_wire.h"
#include "settings.h"
#include "status.h"
#include "stream.h"

using namespace cusim;
using namespace cusim::nccl;

namespace {

struct Communicator {
  ~Communicator() { forget_order(this); }

  std::unique_ptr<Wire> wire;
  int device;
  int splits = 0;

  // Operations run in the order of their calls, whatever streams they are on.
  std::mutex mutex;
  std::condition_variable turn;
  uint64_t called = 0, served = 0;

  uint64_t take_number() {
    std::lock_guard<std::mutex> lock(mutex);
    return called++;
  }
  void run_in_turn(uint64_t number, const std::function<void()> &body) {
    {
      std::unique_lock<std::mutex> lock(mutex);
      turn.wait(lock, [&] { return served == number; });
    }
    if (wire->error() == kOk && !fault()) body();  // after a fault nothing runs any more
    std::lock_guard<std::mutex> lock(mutex);
    served++;
    turn.notify_all();
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex);
    turn.wait(lock, [&] { return served == called; });
  }
};

struct UniqueId {
  char bytes[128];
};

struct Pending {  // a call inside a group, until the group ends
  Communicator *communicator;
  const void *stream;
  Call call;
  const void *from;
  void *to;
};

thread_local int group_depth = 0;
thread_local std::vector<Pending> pending;
thread_local std::vector<Communicator *> joining;

bool reachable(const void *pointer, size_t size, const Call &call) {
  Kind kind;
  if (!size) return true;
  if (!pointer || !within_bounds(pointer, size, ("NCCL's " + describe(call)).c_str(), &kind)) return false;
  if (kind != Kind::kPageable) return true;
  fprintf(stderr, "cusim: NCCL's %s gets %p, which is neither device nor pinned memory\n", describe(call).c_str(), pointer);
  return false;
}

struct Extent {
  size_t read, written;  // bytes
};

Extent extent(const Call &call, int size, int rank) {
  size_t bytes = call.count * type_size(call.type), all = bytes * size;
  bool root = rank == call.root;
  switch (call.verb) {
    case Verb::kReduceScatter: return {all, bytes};
    case Verb::kAllGather: return {bytes, all};
    case Verb::kBroadcast: return {root ? bytes : 0, bytes};
    case Verb::kReduce: return {bytes, root ? bytes : 0};
    case Verb::kSend: return {bytes, 0};
    case Verb::kReceive: return {0, bytes};
    default: return {bytes, bytes};
  }
}

// Puts calls into their stream: one collective, or the sends and receives of a group together.
int submit_calls(const std::vector<Pending> &calls) {
  Communicator *c = calls[0].communicator;
  StreamPointer stream = find_stream(c->device, calls[0].stream);
  if (!stream) return kInvalidArgument;
  std::vector<Access> accesses;
  std::vector<Transfer> transfers;
  std::string name = "NCCL's ";
  for (const Pending &one : calls) {
    Extent bytes = extent(one.call, c->wire->size, c->wire->rank);
    if (bytes.read) accesses.push_back(reads(one.from, bytes.read));
    if (bytes.written) accesses.push_back(writes(one.to, bytes.written));
    transfers.push_back({one.call, (char *)worker_view(one.call.verb == Verb::kSend ? one.from : one.to)});
    name += (&one == &calls[0] ? "" : " + ") + describe(one.call);
  }
  uint64_t number = c->take_number();
  Pending first = calls[0];
  submit(stream, name, accesses, [=](Operation &operation) {
    expect_order(c, c->device, operation);
    c->run_in_turn(number, [&] {
      if (first.call.collective())
        run_collective(*c->wire, first.call, (const char *)worker_view(first.from), (char *)worker_view(first.to));
      else run_transfers(*c->wire, transfers);
    });
  });
  return kOk;
}

int submit_pending() {
  std::vector<Pending> calls = std::move(pending);
  pending.clear();
  std::vector<bool> taken(calls.size());
  int result = kOk;
  for (size_t i = 0; i < calls.size(); i++) {
    if (taken[i]) continue;
    std::vector<Pending> together = {calls[i]};
    for (size_t k = i + 1; !calls[i].call.collective() && k < calls.size(); k++) {
      if (calls[k].call.collective() || calls[k].communicator != calls[i].communicator || calls[k].stream != calls[i].stream) continue;
      together.push_back(calls[k]);
      taken[k] = true;
    }
    int status = submit_calls(together);
    if (status != kOk) result = status;
  }
  return result;
}

int call(Communicator *c, const Call &wanted, const void *from, void *to, const void *stream) {
  if (!c || !type_size(wanted.type) || wanted.root < 0 || wanted.root >= c->wire->size) return kInvalidArgument;
  if (wanted.reduction < 0 || wanted.reduction > 4) return kInvalidArgument;
  Extent bytes = extent(wanted, c->wire->size, c->wire->rank);
  if (!reachable(from, bytes.read, wanted) || !reachable(to, bytes.written, wanted)) return kInvalidArgument;
  pending.push_back({c, stream, wanted, from, to});
  return group_depth ? (int)kOk : submit_pending();
}

Communicator *open_communicator(const std::string &name, int size, int rank, int device) {
  auto *fresh = new Communicator;
  fresh->wire = Wire::open(name, size, rank);
  fresh->device = device;
  if (fresh->wire) return fresh;
  delete fresh;
  return nullptr;
}

int join_or_delete(Communicator **c) {
  if ((*c)->wire->join()) return kOk;
  delete *c;
  *c = nullptr;
  return kSystemError;
}

}  // namespace

#define API extern "C" int
API ncclGetVersion(int *version) { return *version = settings().nccl_version, kOk; }
extern "C" const char *ncclGetErrorString(int result) {
  static const char *const kTexts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                       "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                       "NCCL operation in progress"};
  return result >= 0 && result < 8 ? kTexts[result] : "unknown result code";
}
extern "C" const char *ncclGetLastError(Communicator *) { return ""; }

API ncclGetUniqueId(UniqueId *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "%s", new_wire_name().c_str());
  return kOk;
}
API ncclCommInitRankConfig(Communicator **out, int size, UniqueId id, int rank, void *) {
  static std::atomic<int> opened{0};
  if (rank < 0 || rank >= size || size > 64) return kInvalidArgument;  // 64: the bits of Slot::waits_for
  if (settings().communicators && opened++ >= settings().communicators) return kSystemError;
  *out = open_communicator(id.bytes, size, rank, current_device());
  if (!*out) return kSystemError;
  if (group_depth) return joining.push_back(*out), kOk;
  return join_or_delete(out);
}
API ncclCommInitRank(Communicator **out, int size, UniqueId id, int rank) { return ncclCommInitRankConfig(out, size, id, rank, nullptr); }
API ncclCommInitAll(Communicator **out, int size, const int *devices) {
  UniqueId id;
  ncclGetUniqueId(&id);
  for (int rank = 0; rank < size; rank++)
    if (!(out[rank] = open_communicator(id.bytes, size, rank, devices ? devices[rank] : rank))) return kSystemError;
  return kOk;
}
static int end(Communicator *c) {
  delete c;
  return fault() ? kUnhandledCudaError : kOk;
}
API ncclCommDestroy(Communicator *c) {  // "all ranks on the same node should call": until then it does not return
  c->drain();
  c->wire->leave();
  return end(c);
}
API ncclCommFinalize(Communicator *) { return kOk; }
API ncclCommAbort(Communicator *c) {
  c->wire->abort();  // this rank's side: the others wait on until they abort, too
  c->drain();
  return end(c);
}
API ncclCommCount(Communicator *c, int *out) { return *out = c->wire->size, kOk; }
API ncclCommCuDevice(Communicator *c, int *out) { return *out = c->device, kOk; }
API ncclCommUserRank(Communicator *c, int *out) { return *out = c->wire->rank, kOk; }
API ncclCommGetAsyncError(Communicator *c, int *out) { return *out = c->wire->error(), kOk; }
API ncclCommSplit(Communicator *c, int color, int key, Communicator **out, void *) {
  *out = nullptr;
  c->drain();
  Wire &wire = *c->wire;
  wire.mine().call = {Verb::kSplit, 0, 0, 0, 0};
  wire.mine().color = color;
  wire.mine().key = key;
  if (!wire.barrier()) return kSystemError;
  int size = 0, rank = 0;
  for (int other = 0; other < wire.size; other++) {
    const Slot &slot = wire.slot(other);
    if (slot.color != color) continue;
    size++;
    rank += slot.key < key || (slot.key == key && other < wire.rank);
  }
  if (!wire.barrier()) return kSystemError;
  wire.mine().call = {};
  int split = c->splits++;
  if (color < 0) return kOk;
  *out = open_communicator(wire.name + "_" + std::to_string(split) + "_" + std::to_string(color), size, rank, c->device);
  return *out ? join_or_delete(out) : kSystemError;
}

API ncclGroupStart() { return group_depth++, kOk; }
API ncclGroupEnd() {
  if (group_depth <= 0) return kInvalidUsage;
  if (--group_depth) return kOk;
  bool joined = true;
  for (Communicator *c : joining) joined = c->wire->join() && joined;
  joining.clear();
  int result = submit_pending();
  return joined ? result : (int)kSystemError;
}

API ncclAllReduce(const void *from, void *to, size_t n, int type, int reduction, Communicator *c, void *stream) {
  return call(c, {Verb::kAllReduce, type, reduction, 0, n}, from, to, stream);
}
API ncclReduceScatter(const void *from, void *to, size_t n, int type, int reduction, Communicator *c, void *stream) {
  return call(c, {Verb::kReduceScatter, type, reduction, 0, n}, from, to, stream);
}
API ncclAllGather(const void *from, void *to, size_t n, int type, Communicator *c, void *stream) {
  return call(c, {Verb::kAllGather, type, 0, 0, n}, from, to, stream);
}
API ncclBroadcast(const void *from, void *to, size_t n, int type, int root, Communicator *c, void *stream) {
  return call(c, {Verb::kBroadcast, type, 0, root, n}, from, to, stream);
}
API ncclBcast(void *data, size_t n, int type, int root, Communicator *c, void *stream) {
  return call(c, {Verb::kBroadcast, type, 0, root, n}, data, data, stream);
}
API ncclReduce(const void *from, void *to, size_t n, int type, int reduction, int root, Communicator *c, void *stream) {
  return call(c, {Verb::kReduce, type, reduction, root, n}, from, to, stream);
}
API ncclSend(const void *from, size_t n, int type, int peer, Communicator *c, void *stream) {
  return call(c, {Verb::kSend, type, 0, peer, n}, from, nullptr, stream);
}
API ncclRecv(void *to, size_t n, int type, int peer, Communicator *c, void *stream) {
  return call(c, {Verb::kReceive, type, 0, peer, n}, nullptr, to, stream);
}
