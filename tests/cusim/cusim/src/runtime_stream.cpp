// The CUDA runtime API: streams, events, callbacks.
#include "capture.h"
#include "device.h"
#include "event.h"
#include "runtime_api.h"
#include "status.h"
#include "stream.h"

using namespace cusim;

static cudaError_t new_stream(cudaStream_t *out, unsigned flags, int priority) {
  make_context(true);
  return *out = (cudaStream_t)create_stream(flags, priority), answer(kSuccess);
}

API cudaStreamCreate(cudaStream_t *out) { return new_stream(out, 0, 0); }
API cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return new_stream(out, flags, 0); }
API cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) { return new_stream(out, flags, priority); }
API cudaStreamDestroy(cudaStream_t handle) { return answer(destroy_stream(handle)); }
API cudaStreamGetFlags(cudaStream_t handle, unsigned *flags) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  return *flags = stream->flags, answer(kSuccess);
}
API cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  return *priority = stream->priority, answer(kSuccess);
}
API cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return answer(kSuccess);
}
API cudaStreamSynchronize(cudaStream_t handle) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  synchronize(stream);
  return answer(fault());
}
API cudaStreamQuery(cudaStream_t handle) {
  if (int forbidden = check_captures()) return answer(forbidden);
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  return answer(fault() ? fault() : query(stream) ? kSuccess : kNotReady);
}
API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) { return answer(stream_wait_event(stream, event)); }
API cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *argument) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  submit(stream, "host function", {}, [=](Operation &) { function(argument); });
  return answer(kSuccess);
}
API cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void *argument, unsigned) {
  StreamPointer stream = find_stream(handle);
  if (!stream) return answer(kInvalidHandle);
  submit(stream, "callback", {}, [=](Operation &) { function(handle, cudaSuccess, argument); });
  return answer(kSuccess);
}

API cudaEventCreate(cudaEvent_t *out) { return *out = (cudaEvent_t)create_event(0), answer(kSuccess); }
API cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) { return *out = (cudaEvent_t)create_event(flags), answer(kSuccess); }
API cudaEventDestroy(cudaEvent_t event) { return answer(destroy_event(event)); }
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return answer(record_event(event, stream)); }
API cudaEventQuery(cudaEvent_t event) {
  if (int forbidden = check_captures()) return answer(forbidden);
  int status = query_event(event);
  return answer(fault() ? fault() : status);
}
API cudaEventSynchronize(cudaEvent_t event) {
  int status = synchronize_event(event);
  return answer(fault() ? fault() : status);
}
API cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) { return answer(elapsed_time(milliseconds, from, to)); }
