#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

namespace {

thread_local cusim_position position;

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber {
  char *stack = nullptr;
  void *stack_pointer = nullptr;
  State state = State::kReady;
  unsigned mask = 0;  // of the warp barrier it waits at
  cusim_index thread{};
};

struct Block {  // kept per worker: stacks are used again
  std::vector<Fiber> fibers;
  void *scheduler = nullptr;  // its stack pointer
  unsigned current = 0;
  const cusim::Launch *launch = nullptr;
};

constexpr size_t kStackBytes = 128 * 1024;
constexpr unsigned kWarp = 32;
constexpr unsigned kSlotBytes = 16;

thread_local Block block;
thread_local bool in_fiber = false;

}  // namespace

// Saves the registers that a call keeps, and goes on where `load` was saved.
extern "C" void cusim_switch_stack(void **save, void *load);
asm(R"(
.text
.globl cusim_switch_stack
.hidden cusim_switch_stack
.type cusim_switch_stack, @function
cusim_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cusim_switch_stack, .-cusim_switch_stack
)");

namespace {

void leave(State state, unsigned mask) {
  if (!in_fiber) return;
  Fiber &fiber = block.fibers[block.current];
  fiber.state = state;
  fiber.mask = mask;
  cusim_switch_stack(&fiber.stack_pointer, block.scheduler);
}

void fiber_main() {
  const cusim::Launch &launch = *block.launch;
  launch.kernel->call(launch.kernel->function, launch.arguments);
  leave(State::kDone, 0);
  abort();  // a finished fiber is never entered again
}

void prepare(Fiber &fiber, unsigned index) {
  if (!fiber.stack)
    fiber.stack = (char *)mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void **top = (void **)(fiber.stack + kStackBytes - 64);
  *--top = nullptr;  // aligns the stack as a call would
  *--top = (void *)fiber_main;
  for (int saved = 0; saved < 6; saved++) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.state = State::kReady;
  const cusim_index &size = position.block_size;
  fiber.thread = {index % size.x, index / size.x % size.y, index / (size.x * size.y)};
}

// Lets go those lanes of each warp whose barrier is complete; lanes that have finished count as come.
bool pass_warp_barriers(unsigned count) {
  bool passed = false;
  for (unsigned first = 0; first < count; first += kWarp) {
    unsigned lanes = count - first < kWarp ? count - first : kWarp;
    unsigned all = lanes == kWarp ? ~0u : (1u << lanes) - 1, waiting = 0, finished = 0;
    for (unsigned lane = 0; lane < lanes; lane++) {
      State state = block.fibers[first + lane].state;
      if (state == State::kAtWarpBarrier) waiting |= 1u << lane;
      if (state == State::kDone) finished |= 1u << lane;
    }
    for (unsigned lane = 0; lane < lanes; lane++) {
      if (!(waiting >> lane & 1)) continue;
      unsigned needed = block.fibers[first + lane].mask & all & ~finished;
      if ((waiting & needed) != needed) continue;
      for (unsigned other = 0; other < lanes; other++)
        if (needed >> other & 1) block.fibers[first + other].state = State::kReady;
      waiting &= ~needed;
      passed = true;
    }
  }
  return passed;
}

bool run_fibers(unsigned count, char *exchange) {
  for (unsigned i = 0; i < count; i++) prepare(block.fibers[i], i);
  for (;;) {
    bool ran = false;
    unsigned done = 0, at_barrier = 0;
    for (unsigned i = 0; i < count; i++) {
      Fiber &fiber = block.fibers[i];
      if (fiber.state == State::kReady) {
        ran = true;
        block.current = i;
        position.thread = fiber.thread;
        position.lane = i % kWarp;
        position.warp_exchange = exchange + i / kWarp * kWarp * kSlotBytes;
        in_fiber = true;
        cusim_switch_stack(&block.scheduler, fiber.stack_pointer);
        in_fiber = false;
      }
      done += fiber.state == State::kDone;
      at_barrier += fiber.state == State::kAtBlockBarrier;
    }
    if (done == count) return true;
    if (done + at_barrier == count) {
      for (unsigned i = 0; i < count; i++)
        if (block.fibers[i].state == State::kAtBlockBarrier) block.fibers[i].state = State::kReady;
      continue;
    }
    if (!pass_warp_barriers(count) && !ran) return false;
  }
}

void run_loops(const cusim::Launch &launch) {
  cusim_index &thread = position.thread;
  for (thread.z = 0; thread.z < launch.block.z; thread.z++)
    for (thread.y = 0; thread.y < launch.block.y; thread.y++)
      for (thread.x = 0; thread.x < launch.block.x; thread.x++) launch.kernel->call(launch.kernel->function, launch.arguments);
}

}  // namespace

bool cusim::run_blocks(const Launch &launch) {
  unsigned count = launch.block.x * launch.block.y * launch.block.z;
  std::vector<char> shared(launch.dynamic_shared + 64), exchange(1024 * kSlotBytes);
  position.grid_size = launch.grid;
  position.block_size = launch.block;
  position.dynamic_shared = (char *)(((uintptr_t)shared.data() + 63) & ~(uintptr_t)63);
  in_fiber = false;  // a kernel that faulted may have left it set
  block.launch = &launch;
  if (launch.fibers && block.fibers.size() < count) block.fibers.resize(count);
  cusim_index &at = position.block;
  for (at.z = 0; at.z < launch.grid.z; at.z++)
    for (at.y = 0; at.y < launch.grid.y; at.y++)
      for (at.x = 0; at.x < launch.grid.x; at.x++) {
        if (!launch.fibers) run_loops(launch);
        else if (!run_fibers(count, exchange.data())) return false;
      }
  return true;
}

extern "C" cusim_position *cusim_where() { return &position; }
extern "C" void cusim_barrier() { leave(State::kAtBlockBarrier, 0); }
extern "C" void cusim_warp_barrier(unsigned mask) { leave(State::kAtWarpBarrier, mask); }
