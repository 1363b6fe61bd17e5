// NVRTC: compiles CUDA C++ for the host, with the device language of ../device, into an image that kernel.cpp loads.
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "kernel.h"
#include "settings.h"

extern char **environ;

using cusim::settings;

namespace {

enum { kOk = 0, kOutOfRoom = 1, kInvalidProgram = 4, kCompilation = 6, kBuiltinOperation = 7, kNoLoweredName = 9 };

using Lines = std::vector<std::string>;

struct Program {
  std::string source, name;
  std::vector<std::pair<std::string, std::string>> headers;
  Lines expressions;                           // name expressions: templates to instantiate
  std::map<std::string, std::string> lowered;  // expression → name in the image
  std::string log, image;
};

std::string read(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string &path, const std::string &content) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << content;
}

// `extern __shared__ T name[];` becomes a pointer to the block's dynamic shared memory.
std::string with_dynamic_shared(const std::string &source) {
  static const std::regex declaration(
      R"(extern\s+__shared__\s+((?:__align__\s*\([^)]*\)\s*)?)([\w:\s]+?[\s\*]+)(\w+)\s*\[\s*\]\s*;)");
  return std::regex_replace(source, declaration, "$2*$3 = ($2*)cusim_where()->dynamic_shared;");
}

// Names of the kernels that are no templates.
std::set<std::string> kernels_in(const std::string &source) {
  static const std::regex comment(R"(//[^\n]*)");
  static const std::regex kernel(
      R"(__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(?:static\s+|inline\s+)*void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\()");
  std::string code = std::regex_replace(source, comment, "");
  std::set<std::string> names;
  for (std::sregex_iterator at(code.begin(), code.end(), kernel), end; at != end; ++at) {
    size_t before = code.find_last_not_of(" \t\r\n", at->position() ? at->position() - 1 : 0);
    bool is_template = at->position() && before != std::string::npos && code[before] == '>';
    if (!is_template) names.insert((*at)[1]);
  }
  return names;
}

// The table that kernel.cpp looks for, with what name expressions ask for.
std::string registration(Program &program) {
  std::set<std::string> names = kernels_in(program.source);
  std::ostringstream table;
  table << "\nextern \"C\" { extern cusim_kernel cusim_kernels[]; }\ncusim_kernel cusim_kernels[] = {\n";
  for (const std::string &name : names) table << "  cusim_describe(\"" << name << "\", &" << name << "),\n";
  int count = 0;
  for (const std::string &expression : program.expressions) {
    std::string lowered = names.count(expression) ? expression : "cusim_expression_" + std::to_string(count++);
    program.lowered[expression] = lowered;
    if (lowered != expression) table << "  cusim_describe(\"" << lowered << "\", &" << expression << "),\n";
  }
  table << "  {0, 0, 0, 0, 0}};\n";
  return table.str();
}

// Of NVRTC's options, those that mean something to a host compiler.
Lines host_options(int count, const char *const *options) {
  Lines kept;
  std::string standard = "-std=gnu++17";
  auto value = [](const std::string &option) { return option.substr(option.find('=') + 1); };
  for (int i = 0; i < count; i++) {
    std::string option = options[i];
    if (option == "-I" || option == "-D") {
      if (i + 1 < count) kept.push_back(option + options[++i]);
    } else if (option.rfind("-I", 0) == 0 || option.rfind("-D", 0) == 0) {
      kept.push_back(option);
    } else if (option.rfind("--include-path=", 0) == 0) {
      kept.push_back("-I" + value(option));
    } else if (option.rfind("--define-macro=", 0) == 0) {
      kept.push_back("-D" + value(option));
    } else if (option.rfind("--std=", 0) == 0 || option.rfind("-std=", 0) == 0) {
      std::string wanted = value(option);
      if (wanted != "c++11" && wanted != "c++14") standard = "-std=gnu" + wanted.substr(1);  // the headers need 17
    }
  }
  kept.insert(kept.begin(), standard);
  return kept;
}

bool run(const Lines &command, const std::string &log) {
  std::vector<char *> arguments;
  std::string whole;
  for (const std::string &word : command) {
    arguments.push_back(const_cast<char *>(word.c_str()));
    whole += word + " ";
  }
  arguments.push_back(nullptr);
  cusim::trace("%s", whole.c_str());
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  pid_t child;
  int failed = posix_spawnp(&child, arguments[0], &files, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  if (failed) {
    write(log, "cusim: cannot run " + command[0] + ": " + strerror(failed) + ". Install it or set CUSIM_CXX.\n");
    return false;
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Whether options ask for subnormal numbers to be flushed to zero; the last word counts, as NVRTC takes it.
bool flushes(int count, const char *const *options) {
  bool flush = false;
  for (int i = 0; i < count; i++) {
    std::string option = options[i];
    if (option == "--ftz=true" || option == "-ftz=true" || option == "--use_fast_math" || option == "-use_fast_math") flush = true;
    if (option == "--ftz=false" || option == "-ftz=false") flush = false;
  }
  return flush;
}

std::string make_image(const std::string &object, bool flush) {
  cusim::ImageHeader header{};
  header.flush = flush;
  memcpy(header.magic, cusim::kImageMagic, sizeof header.magic);
  header.fibers = object.find("cusim_barrier") != std::string::npos || object.find("cusim_warp_barrier") != std::string::npos;
  header.size = object.size();
  return std::string((const char *)&header, sizeof header) + object;
}

}  // namespace

#define API extern "C" int
API nvrtcVersion(int *major, int *minor) { return *major = 12, *minor = 9, kOk; }
extern "C" const char *nvrtcGetErrorString(int status) {
  return status == kOk ? "NVRTC_SUCCESS" : status == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}
API nvrtcGetNumSupportedArchs(int *count) { return *count = 1, kOk; }
API nvrtcGetSupportedArchs(int *architectures) { return architectures[0] = 80, kOk; }
API nvrtcCreateProgram(Program **out, const char *source, const char *name, int count, const char *const *headers,
                       const char *const *header_names) {
  *out = new Program;
  (*out)->source = source;
  (*out)->name = name && *name ? name : "default_program";
  for (int i = 0; i < count; i++) (*out)->headers.push_back({header_names[i], headers[i]});
  return kOk;
}
API nvrtcDestroyProgram(Program **program) {
  delete *program;
  *program = nullptr;
  return kOk;
}
API nvrtcAddNameExpression(Program *program, const char *expression) {
  program->expressions.push_back(expression);
  return kOk;
}
API nvrtcGetLoweredName(Program *program, const char *expression, const char **out) {
  auto found = program->lowered.find(expression);
  if (found == program->lowered.end()) return kNoLoweredName;
  return *out = found->second.c_str(), kOk;
}
API nvrtcCompileProgram(Program *program, int count, const char *const *options) {
  if (program->source.find_first_not_of(" \n\t") == std::string::npos) {  // CuPy's way to ask what compiler this is
    program->image = "// cusim, " + settings().device_headers + ", " + settings().compiler_flags + "\n";
    return kOk;
  }
  std::string pattern = (std::filesystem::temp_directory_path() / "cusim_kernel_XXXXXX").string();
  if (!mkdtemp(pattern.data())) return kBuiltinOperation;
  const std::string &directory = pattern, log = directory + "/log";
  for (auto &[name, content] : program->headers) write(directory + "/" + name, content);
  write(directory + "/kernel.cpp", "#line 1 \"" + program->name + "\"\n" + with_dynamic_shared(program->source) + registration(*program));

  Lines command = {settings().compiler};
  std::istringstream flags(settings().compiler_flags);
  command.insert(command.end(), std::istream_iterator<std::string>(flags), {});
  for (const std::string &option : host_options(count, options)) command.push_back(option);
  // -fsanitize=thread reports every access (access.cpp); without default libraries, as its runtime must stay out.
  // -Bsymbolic: a kernel called "write" is not the C library's.
  for (const char *option : {"-fsanitize=thread", "-nodefaultlibs", "-Wl,-Bsymbolic", "-fPIC", "-shared", "-w", "-fpermissive", "-fwrapv",
                             "-fno-strict-aliasing", "-fno-gnu-unique", "-ffp-contract=off", "-include", "language.h"})
    command.push_back(option);
  command.insert(command.begin() + 1, {"-I" + directory, "-I" + settings().device_headers});
  for (const std::string &last : {std::string("-o"), directory + "/kernel.so", directory + "/kernel.cpp", std::string("-lstdc++"),
                                  std::string("-lm"), std::string("-lgcc_s"), std::string("-lgcc"), std::string("-lc")})
    command.push_back(last);

  bool compiled = run(command, log);
  program->log = read(log);
  if (compiled) program->image = make_image(read(directory + "/kernel.so"), flushes(count, options));
  if (settings().keep) fprintf(stderr, "cusim: kept %s\n", directory.c_str());
  else std::filesystem::remove_all(directory);
  return compiled ? kOk : kCompilation;
}

static int size_of(const std::string &what, size_t *size) { return *size = what.size() + 1, kOk; }
static int copy_out(const std::string &what, char *out) { return memcpy(out, what.c_str(), what.size() + 1), kOk; }
API nvrtcGetProgramLogSize(Program *program, size_t *size) { return size_of(program->log, size); }
API nvrtcGetProgramLog(Program *program, char *out) { return copy_out(program->log, out); }
API nvrtcGetPTXSize(Program *program, size_t *size) { return size_of(program->image, size); }
API nvrtcGetPTX(Program *program, char *out) { return copy_out(program->image, out); }
API nvrtcGetCUBINSize(Program *program, size_t *size) { return size_of(program->image, size); }
API nvrtcGetCUBIN(Program *program, char *out) { return copy_out(program->image, out); }
