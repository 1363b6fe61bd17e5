// Events: a place in a stream that others can wait for. Recording again makes a new place; old waits keep theirs.
#pragma once

namespace cusim {

constexpr unsigned kDisableTiming = 2;  // cudaEventDisableTiming

void *create_event(unsigned flags);
int destroy_event(void *handle);
int record_event(void *handle, const void *stream);
int query_event(void *handle);
int synchronize_event(void *handle);
int elapsed_time(float *milliseconds, void *from, void *to);
int stream_wait_event(const void *stream, void *handle);

}  // namespace cusim
