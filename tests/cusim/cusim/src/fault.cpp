#include "fault.h"

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <mutex>

#include "memory.h"
#include "report.h"

namespace cusim {

namespace {

thread_local const std::string *running = nullptr;  // the kernel on this thread
thread_local sigjmp_buf way_out;
struct sigaction previous;

// Whether a register held an address of the device view; all of them then hold the same place in the worker view.
bool translate_registers(ucontext_t *context) {
  static const int kRegisters[] = {REG_RAX, REG_RBX, REG_RCX, REG_RDX, REG_RSI, REG_RDI, REG_RBP, REG_R8,
                                   REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  bool translated = false;
  for (int number : kRegisters) {
    greg_t &value = context->uc_mcontext.gregs[number];
    greg_t worker = (greg_t)(uintptr_t)worker_view((void *)value);
    if (worker == value) continue;
    value = worker;
    translated = true;
  }
  return translated;
}

void handle(int number, siginfo_t *info, void *context) {
  auto address = (uintptr_t)info->si_addr;
  if (running) {
    if (in_device_memory(address) && translate_registers((ucontext_t *)context)) return;
    report("bounds", *running + text(" touches %#lx, which is no memory of the device", (unsigned long)address));
    siglongjmp(way_out, 1);
  }
  if (info->si_code > 0 && in_device_memory(address))
    fprintf(stderr,
            "cusim: host code touched device memory: %s. Copy it to the host first, or let a stream's operation do the work.\n",
            describe_address(address, 1).c_str());
  sigaction(number, &previous, nullptr);  // the instruction runs again and ends the process as it would have
}

}  // namespace

void watch_faults() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == handle) return;
  previous = now;
  struct sigaction ours = {};
  ours.sa_sigaction = handle;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

bool run_guarded(const std::string &operation, const std::function<void()> &body) {
  watch_faults();
  if (sigsetjmp(way_out, 1)) {
    running = nullptr;
    return false;
  }
  running = &operation;
  body();
  running = nullptr;
  return true;
}

}  // namespace cusim
