// Relinking: CuPy's extension modules carry libcudart inside them; their calls into it are pointed at the functions of the
// same name in this library (runtime_*.cpp).
//
// Only call and jump instructions of CuPy's own code are changed, in this process's memory, found with the module's symbol
// table. The file stays as it is. The bundled libcudart is neither changed nor entered, and nothing of it is answered.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "settings.h"
#include "status.h"

namespace {

enum RelinkError { kNotLoaded = -1, kStripped = -2, kNoRoom = -3, kUnreadable = -4 };

constexpr size_t kThunkBytes = 32;
constexpr uintptr_t kPage = 4096;

bool is_runtime_call(const char *name) { return !strncmp(name, "cuda", 4) && name[4] >= 'A' && name[4] <= 'Z'; }

bool belongs_to_runtime(const std::string &name) {
  return is_runtime_call(name.c_str()) || name.rfind("__cuda", 0) == 0 || name.rfind("libcudart_static", 0) == 0;
}

class File {  // a module's file, mapped to read its symbols
 public:
  explicit File(const char *path) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file >= 0 && !fstat(file, &status)) {
      size_ = status.st_size;
      data_ = (char *)mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    }
    if (file >= 0) close(file);
  }
  ~File() {
    if (ok()) munmap(data_, size_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  const Elf64_Ehdr *header() const { return (const Elf64_Ehdr *)data_; }
  const Elf64_Shdr *sections() const { return (const Elf64_Shdr *)(data_ + header()->e_shoff); }
  const char *at(const Elf64_Shdr &section) const { return data_ + section.sh_offset; }
  const Elf64_Shdr *find(unsigned type, const char *name) const {
    const char *names = at(sections()[header()->e_shstrndx]);
    for (int i = 0; i < header()->e_shnum; i++) {
      const Elf64_Shdr &section = sections()[i];
      if ((!type || section.sh_type == type) && (!name || !strcmp(names + section.sh_name, name))) return &section;
    }
    return nullptr;
  }

 private:
  char *data_ = (char *)MAP_FAILED;
  size_t size_ = 0;
};

struct Symbols {
  std::map<uint64_t, std::string> runtime;                   // address of a cudaXxx in the bundled runtime → its name
  std::vector<std::pair<uint64_t, std::string>> functions;   // all, sorted

  Symbols(const File &file, const Elf64_Shdr &table) {
    const char *names = file.at(file.sections()[table.sh_link]);
    auto *symbol = (const Elf64_Sym *)file.at(table);
    for (size_t i = 0; i < table.sh_size / sizeof *symbol; i++) {
      if (ELF64_ST_TYPE(symbol[i].st_info) != STT_FUNC || !symbol[i].st_value) continue;
      const char *name = names + symbol[i].st_name;
      functions.push_back({symbol[i].st_value, name});
      if (is_runtime_call(name)) runtime[symbol[i].st_value] = name;
    }
    std::sort(functions.begin(), functions.end());
  }
  const std::string &around(uint64_t address) const {
    static const std::string nobody;
    auto next = std::upper_bound(functions.begin(), functions.end(), std::make_pair(address, std::string("\xff")));
    return next == functions.begin() ? nobody : std::prev(next)->second;
  }
};

extern "C" int cusim_unsupported(const char *name) {
  fprintf(stderr, "cusim: %s is not emulated (see tests/cusim/README.md).\n", name);
  return cusim::kNotSupported;
}

// Jumps to our functions, near enough to the module for a call to reach.
class Thunks {
 public:
  Thunks(uintptr_t module, size_t count) {
    size_ = (count * kThunkBytes + kPage - 1) & ~(kPage - 1);
    uintptr_t step = 0x10000, at = (module & ~(step - 1)) - size_ - step;
    for (int attempt = 0; attempt < 8192 && start_ == MAP_FAILED; attempt++, at -= step)
      start_ = (char *)mmap((void *)at, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    next_ = start_;
  }
  bool ok() const { return start_ != MAP_FAILED; }
  char *to(const std::string &name) {
    char *&thunk = known_[name];
    if (thunk) return thunk;
    thunk = next_;
    next_ += kThunkBytes;
    char *code = thunk;
    void *target = dlsym(RTLD_DEFAULT, name.c_str());
    if (!target) {  // mov rdi, name
      const char *kept = strdup(name.c_str());
      memcpy(code, "\x48\xbf", 2);
      memcpy(code + 2, &kept, sizeof kept);
      code += 10;
      target = (void *)cusim_unsupported;
    }
    memcpy(code, "\xff\x25\0\0\0\0", 6);  // jmp to the address that follows
    memcpy(code + 6, &target, sizeof target);
    return thunk;
  }
  void seal() { mprotect(start_, size_, PROT_READ | PROT_EXEC); }

 private:
  char *start_ = (char *)MAP_FAILED, *next_ = nullptr;
  size_t size_ = 0;
  std::map<std::string, char *> known_;
};

struct Loaded {
  const char *path;
  uintptr_t base = 0;
  bool found = false;
};

int is_it(dl_phdr_info *info, size_t, void *wanted) {
  auto *loaded = (Loaded *)wanted;
  if (!info->dlpi_name || strcmp(info->dlpi_name, loaded->path)) return 0;
  loaded->base = info->dlpi_addr;
  loaded->found = true;
  return 1;
}

}  // namespace

// Returns how many calls were relinked (0: the module does not bundle a runtime), or a RelinkError.
extern "C" int cusim_relink(const char *path) {
  Loaded loaded{path};
  dl_iterate_phdr(is_it, &loaded);
  if (!loaded.found) return kNotLoaded;
  File file(path);
  if (!file.ok()) return kUnreadable;
  const Elf64_Shdr *table = file.find(SHT_SYMTAB, nullptr), *code = file.find(0, ".text");
  if (!table || !code) return kStripped;
  Symbols symbols(file, *table);
  if (symbols.runtime.empty()) return 0;
  Thunks thunks(loaded.base, symbols.runtime.size());
  if (!thunks.ok()) return kNoRoom;

  auto *first = (unsigned char *)(loaded.base + code->sh_addr), *end = first + code->sh_size;
  uintptr_t page = (uintptr_t)first & ~(kPage - 1), pages = (((uintptr_t)end + kPage - 1) & ~(kPage - 1)) - page;
  mprotect((void *)page, pages, PROT_READ | PROT_WRITE | PROT_EXEC);
  int calls = 0;
  for (unsigned char *at = first; at + 5 <= end; at++) {
    if (*at != 0xe8 && *at != 0xe9) continue;  // call, jmp
    int32_t distance;
    memcpy(&distance, at + 1, sizeof distance);
    auto target = symbols.runtime.find((uint64_t)((uintptr_t)at + 5 + distance - loaded.base));
    if (target == symbols.runtime.end()) continue;
    if (belongs_to_runtime(symbols.around((uintptr_t)at - loaded.base))) continue;
    distance = (int32_t)((intptr_t)thunks.to(target->second) - ((intptr_t)at + 5));
    memcpy(at + 1, &distance, sizeof distance);
    calls++;
  }
  mprotect((void *)page, pages, PROT_READ | PROT_EXEC);
  thunks.seal();
  cusim::trace("relinked %d calls in %s", calls, path);
  return calls;
}
