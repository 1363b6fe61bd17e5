#include "kernel.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "access.h"
#include "device.h"
#include "fault.h"
#include "fiber.h"
#include "memory.h"
#include "report.h"
#include "settings.h"
#include "status.h"
#include "stream.h"

namespace cusim {

struct Module {
  void *object = nullptr;
  bool fibers = false, flush = false;
  std::map<std::string, Function> functions;
  std::vector<void *> variables;  // registered as device memory
};

int load_module(const void *image, Module **out) {
  ImageHeader header;
  memcpy(&header, image, sizeof header);
  if (memcmp(header.magic, kImageMagic, sizeof header.magic)) return kNoBinaryForDevice;
  // A path that was never used before: dlopen() takes equal paths for equal objects, also of one that is long closed.
  static std::atomic<unsigned> count{0};
  auto path = std::filesystem::temp_directory_path() / text("cusim_module_%d_%u.so", (int)getpid(), count++);
  std::ofstream(path, std::ios::binary).write((const char *)image + sizeof header, (std::streamsize)header.size);
  void *object = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  unlink(path.c_str());
  if (!object) {
    fprintf(stderr, "cusim: %s\n", dlerror());
    return kInvalidImage;
  }
  auto *module = new Module;
  module->object = object;
  module->fibers = header.fibers;
  module->flush = header.flush;
  for (auto *kernel = (const cusim_kernel *)dlsym(object, "cusim_kernels"); kernel && kernel->name; kernel++)
    module->functions[kernel->name] = {module, kernel};
  *out = module;
  return kSuccess;
}

void unload_module(Module *module) {
  synchronize_all();
  for (void *variable : module->variables) unregister_memory(variable);
  dlclose(module->object);
  delete module;
}

Function *find_function(Module *module, const char *name) {
  auto found = module->functions.find(name);
  return found == module->functions.end() ? nullptr : &found->second;
}

void *find_variable(Module *module, const char *name, size_t *size) {
  void *address = dlsym(module->object, name);
  if (!address) return nullptr;
  Dl_info info;
  ElfW(Sym) *symbol = nullptr;
  dladdr1(address, &info, (void **)&symbol, RTLD_DL_SYMENT);
  *size = symbol ? symbol->st_size : 1;
  if (register_memory(address, *size, Kind::kDevice) == kSuccess) module->variables.push_back(address);
  return address;
}

namespace {

// While it lives, this thread's floating-point arithmetic flushes subnormal numbers to zero, on the way in and out. The host's
// switch is for doubles, too, where a GPU's is for floats alone.
class Flushing {
 public:
  explicit Flushing(bool flush) : before_(_mm_getcsr()) {
    if (flush) _mm_setcsr(before_ | 0x8040);
  }
  ~Flushing() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// The arguments of a launch, copied, with every device address in them translated to the worker view: pointers, and the
// pointers inside structs (CuPy passes arrays as a struct of pointer, shape and strides).
class Arguments {
 public:
  explicit Arguments(const cusim_kernel &kernel, void **parameters) {
    size_t total = 0;
    for (int i = 0; i < kernel.parameter_count; i++) {
      total = (total + 15) & ~(size_t)15;
      offsets_.push_back(total);
      total += kernel.parameters[i].size;
    }
    bytes_.resize(total + 16);
    for (int i = 0; i < kernel.parameter_count; i++) {
      char *target = bytes_.data() + offsets_[i];
      memcpy(target, parameters[i], kernel.parameters[i].size);
      for (size_t word = 0; word + sizeof(void *) <= kernel.parameters[i].size; word += sizeof(void *)) {
        void *value;
        memcpy(&value, target + word, sizeof value);
        value = worker_view(value);
        memcpy(target + word, &value, sizeof value);
      }
    }
  }
  void *pointer(int index) const {
    void *value;
    memcpy(&value, bytes_.data() + offsets_[index], sizeof value);
    return value;
  }
  std::vector<void *> addresses() {
    std::vector<void *> found;
    for (size_t offset : offsets_) found.push_back(bytes_.data() + offset);
    found.push_back(nullptr);
    return found;
  }

 private:
  std::vector<char> bytes_;
  std::vector<size_t> offsets_;
};

bool pointers_are_reachable(const cusim_kernel &kernel, const Arguments &arguments, const std::string &name) {
  for (int i = 0; i < kernel.parameter_count; i++) {
    void *pointer = kernel.parameters[i].is_pointer ? arguments.pointer(i) : nullptr;
    Allocation found;
    uintptr_t address = device_address((uintptr_t)pointer);
    if (!pointer || in_device_memory(address) || find_allocation((void *)address, &found)) continue;
    report("pointer", name + text(" gets host memory that is not pinned (%p) as argument %d", pointer, i));
    return false;
  }
  return true;
}

}  // namespace

int launch(const Function *function, const unsigned grid[3], const unsigned block[3], unsigned dynamic_shared, const void *handle,
           void **parameters) {
  const cusim_kernel &kernel = *function->kernel;
  unsigned threads = block[0] * block[1] * block[2];
  if (!threads || threads > 1024 || !grid[0] || !grid[1] || !grid[2]) return kInvalidValue;
  if (dynamic_shared > (unsigned)function->max_dynamic_shared || (!parameters && kernel.parameter_count)) return kInvalidValue;
  StreamPointer stream = find_stream(handle);
  if (!stream) return kInvalidHandle;
  std::string name = std::string("kernel ") + kernel.name;
  auto arguments = std::make_shared<Arguments>(kernel, parameters);
  if (!pointers_are_reachable(kernel, *arguments, name)) return kIllegalAddress;

  cusim_index grid_size{grid[0], grid[1], grid[2]}, block_size{block[0], block[1], block[2]};
  bool fibers = function->module->fibers, flush = function->module->flush;
  submit(stream, name, {}, [=, &kernel](Operation &operation) {
    if (fault()) return;  // a broken context runs nothing
    std::vector<void *> addresses = arguments->addresses();
    Launch launch{&kernel, addresses.data(), grid_size, block_size, dynamic_shared, fibers};
    bool barriers_met = true;
    begin_accesses();
    bool whole = [&] {
      Flushing flushing(flush);  // out here: a kernel that faults does not come back to where it was called
      return run_guarded(name, [&] { barriers_met = run_blocks(launch); });
    }();
    bool outside = end_accesses(name, &operation.accesses);
    if (!barriers_met) report("barrier", name + ": its threads wait at barriers that not all of them reach");
    if (!whole || outside || !barriers_met) set_fault(kIllegalAddress);
  });
  return kSuccess;
}

}  // namespace cusim
