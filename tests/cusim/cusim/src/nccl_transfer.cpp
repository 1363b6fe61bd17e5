#include "nccl_transfer.h"

#include <algorithm>
#include <cstring>

#include "nccl_reduce.h"
#include "report.h"

namespace cusim::nccl {

namespace {

// All ranks show their calls; all of them see when two differ.
bool same_everywhere(Wire &wire, const Call &call) {
  wire.mine().call = call;
  if (!wire.barrier()) return false;
  std::string different;
  for (int rank = 0; rank < wire.size; rank++)
    if (!(wire.slot(rank).call == call)) different += text(", rank %d calls ", rank) + describe(wire.slot(rank).call);
  if (!wire.barrier()) return false;  // all have read: nobody's call is gone before the others saw it
  if (different.empty()) return true;
  wire.fail(kInvalidUsage, text("calls that do not belong together: rank %d calls ", wire.rank) + describe(call) + different);
  return false;
}

void finish_chunk(Wire &wire, const Call &call, int part, size_t first, size_t count, char *to) {
  size_t width = type_size(call.type);
  char *out = to + first * width;
  switch (call.verb) {
    case Verb::kAllReduce: return reduce_slots(wire, out, count, call.type, call.reduction);
    case Verb::kReduce:
      if (wire.rank == call.root) reduce_slots(wire, out, count, call.type, call.reduction);
      return;
    case Verb::kReduceScatter:
      if (wire.rank == part) reduce_slots(wire, out, count, call.type, call.reduction);
      return;
    case Verb::kBroadcast: memcpy(out, wire.slot(call.root).data, count * width); return;
    case Verb::kAllGather:
      for (int rank = 0; rank < wire.size; rank++) memcpy(out + rank * call.count * width, wire.slot(rank).data, count * width);
      return;
    default: return;
  }
}

bool run_chunks(Wire &wire, const Call &call, const char *from, char *to) {
  size_t width = type_size(call.type), per_chunk = kChunk / width;
  int parts = call.verb == Verb::kReduceScatter ? wire.size : 1;
  bool gives = call.verb != Verb::kBroadcast || wire.rank == call.root;
  for (int part = 0; part < parts; part++)
    for (size_t first = 0; first < call.count; first += per_chunk) {
      size_t count = std::min(per_chunk, call.count - first);
      if (gives) memcpy(wire.mine().data, from + (part * call.count + first) * width, count * width);
      if (!wire.barrier()) return false;
      finish_chunk(wire, call, part, first, count, to);
      if (!wire.barrier()) return false;
    }
  return true;
}

class Progress {  // of one send or receive
 public:
  Progress(Wire &wire, const Transfer &transfer)
      : wire_(wire), call_(transfer.call), data_(transfer.data), left_(call_.count * type_size(call_.type)) {}

  bool sends() const { return call_.verb == Verb::kSend; }
  int peer() const { return call_.root; }
  bool done() const { return done_; }

  void step() {
    Box &box = sends() ? wire_.box(wire_.rank, peer()) : wire_.box(peer(), wire_.rank);
    if (box.refused) return wire_.fail(kInvalidUsage, differ(box));
    if (sends()) send(box);
    else receive(box);
  }

 private:
  std::string differ(const Box &box) const {
    int from = sends() ? wire_.rank : peer(), to = sends() ? peer() : wire_.rank;
    return text("calls that do not belong together: rank %d calls ", from) + describe(box.send) + text(", rank %d calls ", to) +
           describe(box.receive);
  }
  void send(Box &box) {
    if (box.filled != box.emptied) return;
    if (started_ && !left_) {  // taken to the last byte: as in NCCL, a send ends with its receive
      done_ = true;
      return;
    }
    started_ = true;
    box.send = call_;
    box.bytes = std::min(kChunk, left_);
    memcpy(box.data, data_, box.bytes);
    data_ += box.bytes;
    left_ -= box.bytes;
    box.filled++;
  }
  void receive(Box &box) {
    if (box.filled == box.emptied) return;
    box.receive = call_;
    if (box.send.count != call_.count || box.send.type != call_.type) {
      box.refused = 1;
      return wire_.fail(kInvalidUsage, differ(box));
    }
    memcpy(data_, box.data, box.bytes);
    data_ += box.bytes;
    left_ -= box.bytes;
    done_ = !left_;
    box.emptied++;
  }

  Wire &wire_;
  Call call_;
  char *data_;
  size_t left_;
  bool started_ = false, done_ = false;
};

}  // namespace

void run_collective(Wire &wire, const Call &call, const char *from, char *to) {
  if (same_everywhere(wire, call)) run_chunks(wire, call, from, to);
  wire.mine().call = {};
}

void run_transfers(Wire &wire, std::vector<Transfer> transfers) {
  std::vector<Progress> all;
  for (const Transfer &transfer : transfers) all.emplace_back(wire, transfer);
  if (!all.empty()) wire.mine().call = transfers[0].call;
  wire.wait([&] {
    uint64_t waits_for = 0, sending = 0, receiving = 0;
    for (Progress &progress : all) {
      if (progress.done()) continue;
      uint64_t bit = 1ull << progress.peer(), &busy = progress.sends() ? sending : receiving;
      if (!(busy & bit)) progress.step();  // to and from one peer, in the order of the calls
      busy |= bit;
      if (!progress.done()) waits_for |= bit;
    }
    wire.mine().waits_for = waits_for;
    return !waits_for;
  });
  wire.mine().waits_for = 0;
  wire.mine().call = {};
}

}  // namespace cusim::nccl
