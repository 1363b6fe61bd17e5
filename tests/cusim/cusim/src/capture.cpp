#include "capture.h"

#include <map>
#include <mutex>
#include <thread>

#include "runtime_api.h"
#include "status.h"
#include "stream.h"

namespace cusim {

namespace {

enum Mode { kGlobal, kThreadLocal, kRelaxed };

struct Capture {
  int mode;
  std::thread::id thread;
  bool broken = false;
};

std::mutex captures_mutex;
std::map<const void *, Capture> &captures() {
  static auto *kept = new std::map<const void *, Capture>;
  return *kept;
}
thread_local int mode_of_thread = kGlobal;

}  // namespace

int check_captures() {
  if (mode_of_thread == kRelaxed) return kSuccess;
  std::lock_guard<std::mutex> lock(captures_mutex);
  int status = kSuccess;
  for (auto &[stream, capture] : captures()) {
    bool mine = capture.thread == std::this_thread::get_id();
    if (mine ? capture.mode == kRelaxed : capture.mode != kGlobal || mode_of_thread != kGlobal) continue;
    capture.broken = true;
    status = kCaptureUnsupported;
  }
  return status;
}

bool is_capturing(const void *stream) {
  std::lock_guard<std::mutex> lock(captures_mutex);
  return captures().count(stream);
}

int begin_capture(const void *stream, int mode) {
  if (!find_stream(stream) || (uintptr_t)stream < 8) return kCaptureUnsupported;  // not the default streams
  std::lock_guard<std::mutex> lock(captures_mutex);
  return captures().insert({stream, {mode, std::this_thread::get_id()}}).second ? kSuccess : kInvalidValue;
}

int end_capture(const void *stream) {
  std::lock_guard<std::mutex> lock(captures_mutex);
  auto found = captures().find(stream);
  if (found == captures().end()) return kInvalidValue;
  bool broken = found->second.broken;
  captures().erase(found);
  return broken ? kCaptureInvalidated : kSuccess;
}

void exchange_capture_mode(int *mode) { std::swap(*mode, mode_of_thread); }

}  // namespace cusim

using namespace cusim;

API cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) { return answer(begin_capture(stream, mode)); }
API cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  int status = end_capture(stream);
  *graph = status ? nullptr : (cudaGraph_t) new char;
  return answer(status);
}
API cudaGraphDestroy(cudaGraph_t graph) {
  delete (char *)graph;
  return answer(kSuccess);
}
API cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  return *status = is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, answer(kSuccess);
}
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) { return exchange_capture_mode((int *)mode), answer(kSuccess); }
extern "C" int cuThreadExchangeStreamCaptureMode(int *mode) { return exchange_capture_mode(mode), 0; }
