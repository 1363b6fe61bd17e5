// Findings: what a program did wrong, kept for the tests, printed, and written to CUSIM_REPORT.
#pragma once
#include <string>

namespace cusim {

// `kind` is one of: race, bounds, nccl, pointer. One finding is kept once, however often it happens.
void report(const char *kind, const std::string &text);

// printf into a std::string.
std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace cusim
