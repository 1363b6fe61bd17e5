#include "report.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <set>
#include <vector>

#include "settings.h"

namespace cusim {

namespace {
struct Findings {
  std::mutex mutex;
  std::vector<std::string> lines;
  std::set<std::string> known;
};

Findings &findings() {
  static Findings *kept = new Findings;  // never destroyed: stream workers outlive static destructors
  return *kept;
}
}  // namespace

std::string text(const char *format, ...) {
  char line[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return line;
}

void report(const char *kind, const std::string &what) {
  std::string line = std::string(kind) + ": " + what;
  std::lock_guard<std::mutex> lock(findings().mutex);
  if (!findings().known.insert(line).second) return;
  findings().lines.push_back(line);
  fprintf(stderr, "cusim: %s\n", line.c_str());
  if (settings().report.empty()) return;
  std::string path = settings().report + "/findings." + std::to_string(getpid()) + ".txt";
  if (FILE *file = fopen(path.c_str(), "a")) {
    fprintf(file, "%s\n", line.c_str());
    fclose(file);
  }
}

}  // namespace cusim

// For Python: `cusim.findings()` and `cusim.clear()`.
extern "C" int cusim_findings() {
  std::lock_guard<std::mutex> lock(cusim::findings().mutex);
  return (int)cusim::findings().lines.size();
}

extern "C" int cusim_finding(int index, char *out, int room) {
  std::lock_guard<std::mutex> lock(cusim::findings().mutex);
  if (index < 0 || index >= (int)cusim::findings().lines.size()) return -1;
  return snprintf(out, room, "%s", cusim::findings().lines[index].c_str());
}

extern "C" void cusim_forget_findings() {
  std::lock_guard<std::mutex> lock(cusim::findings().mutex);
  cusim::findings().lines.clear();
  cusim::findings().known.clear();
}
