// cuRAND, as far as cupy.random needs it. Numbers are random, and other than the real library's.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>

#include "device.h"
#include "memory.h"
#include "stream.h"

using namespace cusim;

namespace {

enum { kOk = 0, kLaunchFailure = 201 };

struct Generator {
  std::mt19937_64 engine;
  const void *stream = nullptr;
  int device = current_device();
};

using GeneratorPointer = std::shared_ptr<Generator>;

template <class T, class Draw>
int generate(GeneratorPointer *handle, T *out, size_t count, Draw draw) {
  GeneratorPointer generator = *handle;
  StreamPointer stream = find_stream(generator->device, generator->stream);
  if (!stream) return kLaunchFailure;
  T *target = (T *)worker_view(out);
  submit(stream, "random numbers", {writes(out, count * sizeof(T))}, [=](Operation &) mutable {
    for (size_t i = 0; i < count; i++) target[i] = (T)draw(generator->engine);
  });
  return kOk;
}

// Uniform in (0, 1], as cuRAND's.
template <class T>
T uniform(std::mt19937_64 &engine) {
  return (T)(((engine() >> 11) + 1) * (1.0 / 9007199254740992.0));
}

}  // namespace

#define API extern "C" int
API curandGetVersion(int *version) { return *version = 10310, kOk; }
API curandCreateGenerator(GeneratorPointer **out, int) { return *out = new GeneratorPointer(new Generator), kOk; }
API curandDestroyGenerator(GeneratorPointer *generator) { return delete generator, kOk; }
API curandSetStream(GeneratorPointer *generator, void *stream) { return (*generator)->stream = stream, kOk; }
API curandSetPseudoRandomGeneratorSeed(GeneratorPointer *handle, unsigned long long seed) {
  GeneratorPointer generator = *handle;
  StreamPointer stream = find_stream(generator->device, generator->stream);
  if (!stream) return kLaunchFailure;
  submit(stream, "random seed", {}, [=](Operation &) { generator->engine.seed(seed); });
  return kOk;
}
API curandSetGeneratorOffset(GeneratorPointer *, unsigned long long) { return kOk; }
API curandSetGeneratorOrdering(GeneratorPointer *, int) { return kOk; }
API curandGenerate(GeneratorPointer *g, unsigned *out, size_t n) {
  return generate(g, out, n, [](auto &engine) { return engine(); });
}
API curandGenerateLongLong(GeneratorPointer *g, unsigned long long *out, size_t n) {
  return generate(g, out, n, [](auto &engine) { return engine(); });
}
API curandGenerateUniform(GeneratorPointer *g, float *out, size_t n) { return generate(g, out, n, uniform<float>); }
API curandGenerateUniformDouble(GeneratorPointer *g, double *out, size_t n) { return generate(g, out, n, uniform<double>); }
API curandGenerateNormal(GeneratorPointer *g, float *out, size_t n, float mean, float deviation) {
  return generate(g, out, n, std::normal_distribution<float>(mean, deviation));
}
API curandGenerateNormalDouble(GeneratorPointer *g, double *out, size_t n, double mean, double deviation) {
  return generate(g, out, n, std::normal_distribution<double>(mean, deviation));
}
API curandGenerateLogNormal(GeneratorPointer *g, float *out, size_t n, float mean, float deviation) {
  return generate(g, out, n, std::lognormal_distribution<float>(mean, deviation));
}
API curandGenerateLogNormalDouble(GeneratorPointer *g, double *out, size_t n, double mean, double deviation) {
  return generate(g, out, n, std::lognormal_distribution<double>(mean, deviation));
}
API curandGeneratePoisson(GeneratorPointer *g, unsigned *out, size_t n, double mean) {
  return generate(g, out, n, std::poisson_distribution<unsigned>(mean));
}
