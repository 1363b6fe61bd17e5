// Accesses of kernels: every load and store of a kernel, to the byte.
//
// Kernels are compiled with -fsanitize=thread, which calls __tsan_read4(address) and its kin before each access to memory.
// No sanitizer runtime is linked: those functions are ours (access.cpp), and keep one bit per byte read and per byte
// written. So bounds and races are known exactly, for any kernel, without a word about its arguments.
#pragma once
#include <string>
#include <vector>

#include "race.h"

namespace cusim {

// Between these two, the calling thread's accesses to device, pinned and managed memory are kept.
void begin_accesses();
// Adds what was accessed to `out`; reports what lies outside every allocation and returns whether there was any.
bool end_accesses(const std::string &operation, std::vector<Access> *out);

}  // namespace cusim
