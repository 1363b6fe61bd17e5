// Faults: a touch of memory that the toucher may not touch, named instead of a bare "Segmentation fault".
//
// * Host code touched the device view: the process says which allocation, and ends.
// * A kernel followed a device address that it loaded from memory (a table of pointers): arguments are translated to the
//   worker view at launch, these cannot be; the handler translates the registers and lets the instruction run again.
// * A kernel touched anything else: it is reported with the kernel's name and ends; the context is broken (error 700).
#pragma once
#include <functional>
#include <string>

namespace cusim {

// Puts the handler in place, also when someone else's (faulthandler's) came after ours.
void watch_faults();

// Runs a kernel's body on this thread; false: it was ended by a fault, which has been reported.
bool run_guarded(const std::string &operation, const std::function<void()> &body);

}  // namespace cusim
