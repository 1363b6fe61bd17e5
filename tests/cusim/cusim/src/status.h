// Status: the CUDA error numbers that the emulator answers with (driver and runtime share them), and their names.
#pragma once

namespace cusim {

enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kNoBinaryForDevice = 209,
  kFileNotFound = 301,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kPeerAccessAlreadyEnabled = 704,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCapturedEvent = 907,
  kUnknown = 999,
};

struct StatusText {
  int status;
  const char *driver;   // CUDA_ERROR_…
  const char *runtime;  // cudaError…
  const char *meaning;
};

const StatusText &status_text(int status);

}  // namespace cusim
