// Devices: how many there are, how full they are, which one a thread uses, and the fault a kernel left behind.
#pragma once
#include <cstddef>

namespace cusim {

int device_count();
bool is_device(int device);
int current_device();              // of the calling thread
void use_device(int device);       // of the calling thread
bool has_context();                // whether the calling thread has used a device
void make_context(bool made);

bool reserve_bytes(int device, size_t bytes);  // false: the device is full
void return_bytes(int device, size_t bytes);
size_t free_bytes(int device);

// A kernel that left its bounds breaks the process's CUDA context: each later wait answers with this status.
void set_fault(int status);
int fault();

int attribute(int attribute, int device);  // the numbers of CUdevice_attribute and cudaDeviceAttr agree

}  // namespace cusim
