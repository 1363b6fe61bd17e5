#include "nccl_wire.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <thread>
#include <cstdio>
#include <filesystem>

#include "report.h"
#include "settings.h"

namespace cusim::nccl {

struct Wire::Header {  // zero when fresh
  std::atomic<int> joined;
  std::atomic<int> conflict;  // 1: a rank has found one and writes down the calls, 2: they are written
  std::atomic<int> arrived;
  std::atomic<unsigned> generation;
};

namespace {

constexpr double kPatience = 1.0;  // seconds until a waiting rank looks at what the others are doing
constexpr size_t kHeaderBytes = 4096;

#define kNamePattern "cusim_nccl_%d_"  // the process that made the name; a macro, as the compiler checks formats

struct Type {
  const char *name;
  size_t size;
};
const Type kTypes[] = {{"int8", 1},    {"uint8", 1},   {"int32", 4},   {"uint32", 4},   {"int64", 8},      {"uint64", 8},
                       {"float16", 2}, {"float32", 4}, {"float64", 8}, {"bfloat16", 2}};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool has_ended(pid_t process) {
  char path[64], state = 'Z';
  snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
  FILE *file = fopen(path, "r");
  if (!file) return true;
  if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'R';
  fclose(file);
  return state == 'Z' || state == 'X';
}

}  // namespace

size_t type_size(int type) { return type >= 0 && type < (int)(sizeof kTypes / sizeof *kTypes) ? kTypes[type].size : 0; }

std::string describe(const Call &call) {
  static const char *const kVerbs[] = {"nothing", "AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Reduce", "Send", "Recv", "Split"};
  static const char *const kReductions[] = {"sum", "prod", "max", "min", "avg"};
  std::string words = kVerbs[(int)call.verb];
  if (call.verb == Verb::kNothing || call.verb == Verb::kSplit) return words;
  words += text("(%lu x %s", (unsigned long)call.count, type_size(call.type) ? kTypes[call.type].name : "?");
  switch (call.verb) {
    case Verb::kReduce: words += text(", %s, root %d", kReductions[call.reduction], call.root); break;
    case Verb::kBroadcast: words += text(", root %d", call.root); break;
    case Verb::kSend: words += text(", to rank %d", call.root); break;
    case Verb::kReceive: words += text(", from rank %d", call.root); break;
    case Verb::kAllGather: break;
    default: words += text(", %s", kReductions[call.reduction]);
  }
  return words + ")";
}

std::string new_wire_name() {
  std::error_code ignored;
  for (const auto &entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
    std::string name = entry.path().filename().string();
    int process = 0;
    if (sscanf(name.c_str(), kNamePattern, &process) == 1 && has_ended(process)) shm_unlink(("/" + name).c_str());
  }
  static std::atomic<int> count{0};
  auto now = std::chrono::system_clock::now().time_since_epoch().count();
  return "/" + text(kNamePattern, (int)getpid()) + text("%d_%lx", count++, (unsigned long)now);
}

std::unique_ptr<Wire> Wire::open(const std::string &name, int size, int rank) {
  size_t length = kHeaderBytes + sizeof(Slot) * size + sizeof(Box) * size * size;
  int file = shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  void *memory = ftruncate(file, (off_t)length) ? MAP_FAILED : mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  std::unique_ptr<Wire> wire(new Wire(name, size, rank, (char *)memory, length));
  wire->mine().process = getpid();
  if (++wire->header().joined == size) shm_unlink(name.c_str());  // all are here: nothing stays behind
  return wire;
}

Wire::~Wire() {
  if (header().joined < size) shm_unlink(name.c_str());
  munmap(memory_, length_);
}

Wire::Header &Wire::header() const { return *(Header *)memory_; }
Slot &Wire::slot(int rank) const { return ((Slot *)(memory_ + kHeaderBytes))[rank]; }
Box &Wire::box(int from, int to) const { return ((Box *)(memory_ + kHeaderBytes + sizeof(Slot) * size))[from * size + to]; }

bool Wire::join() {
  return wait([&] { return header().joined >= size; });
}

bool Wire::barrier() {
  Header &h = header();
  unsigned generation = h.generation;
  if (++h.arrived == size) {
    h.arrived = 0;
    h.generation++;
    return error() == kOk;
  }
  return wait([&] { return h.generation != generation; });
}

void Wire::leave() {
  mine().destroys = 1;
  auto everyone_leaves = [&] {
    for (int r = 0; r < size; r++)
      if (slot(r).process != getpid() && !slot(r).destroys && !has_ended(slot(r).process)) return false;
    return true;
  };
  auto began = std::chrono::steady_clock::now();
  while (!everyone_leaves() && error() == kOk) {
    if (std::chrono::steady_clock::now() - began > std::chrono::duration<double>(settings().nccl_timeout)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Wire::abort() {
  int none = kOk;
  error_.compare_exchange_strong(none, kRemoteError);
}

void Wire::fail(int result, const std::string &why) {
  report("nccl", text("rank %d of %d: ", rank, size) + why);
  int none = kOk;
  error_.compare_exchange_strong(none, result);
}

int Wire::error() const { return error_; }

std::string Wire::everyone() const {
  std::string words;
  for (int r = 0; r < size; r++) words += text("%srank %d is in ", r ? ", " : "", r) + describe(slot(r).call);
  return words;
}

// A send or a receive whose peer is in a collective: neither can go on.
bool Wire::calls_conflict() const {
  for (int r = 0; r < size; r++)
    for (int peer = 0; peer < size; peer++)
      if ((slot(r).waits_for >> peer & 1) && slot(peer).call.collective()) return true;
  return false;
}

// Called while waiting: finds out why it may be in vain. False: it is.
bool Wire::look_round(double waited) {
  bool all_joined = header().joined >= size;
  for (int r = 0; r < size; r++)
    if (slot(r).process && r != rank && has_ended(slot(r).process)) {
      fail(kRemoteError, text("rank %d has ended during ", r) + describe(mine().call));
      return false;
    }
  int none = 0;
  if (all_joined && calls_conflict() && header().conflict.compare_exchange_strong(none, 1)) {
    for (int r = 0; r < size; r++) slot(r).failed_call = slot(r).call;
    header().conflict = 2;  // every rank reports it from its own wait
  }
  if (waited < settings().nccl_timeout) return true;
  if (all_joined) fail(kSystemError, text("waited %.0f s: ", waited) + everyone());
  else fail(kSystemError, text("waited %.0f s for all ranks to join: %d of %d did", waited, (int)header().joined, size));
  return false;
}

bool Wire::wait(const std::function<bool()> &ready) {
  double since = 0, looked = 0;
  for (unsigned turn = 0; !ready(); turn++) {
    if (error() != kOk) return false;
    if (header().conflict == 2) {
      std::string calls;
      for (int r = 0; r < size; r++) calls += text("%srank %d calls ", r ? ", " : "", r) + describe(slot(r).failed_call);
      fail(kInvalidUsage, "calls that do not belong together: " + calls);
      return false;
    }
    if (turn < 64) {
      sched_yield();
      continue;
    }
    usleep(50);
    if (turn % 64) continue;
    double now = seconds();
    if (!since) since = looked = now;
    if (now - looked < kPatience) continue;
    looked = now;
    if (!look_round(now - since)) return false;
  }
  return true;
}

}  // namespace cusim::nccl
