// Captures of streams into graphs, as far as other threads notice: what breaks one. Nothing can be queued in a capture here.
#pragma once

namespace cusim {

// A call that CUDA may forbid while a stream is captured: 0, or the error that it answers with; then captures are broken.
int check_captures();

bool is_capturing(const void *stream);
int begin_capture(const void *stream, int mode);
int end_capture(const void *stream);
void exchange_capture_mode(int *mode);  // of the calling thread

}  // namespace cusim
