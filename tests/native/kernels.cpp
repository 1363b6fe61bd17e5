// Checksums against a bitwise reference, every kernel over arrays that end where their memory ends, and doorbells.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "accumulate.h"
#include "cast.h"
#include "crc32c.h"
#include "doorbell.h"
#include "finite.h"
#include "harness.h"
#include "memory.h"
#include "optim.h"
#include "reduce.h"
#include "square.h"

namespace harness {
namespace {

using zerort::crc32c;
using zerort::Dtype;

// Bytes at the very end of a block of their own, `skew` bytes after its start: AddressSanitizer knows the end to the byte.
class Tight {
 public:
  Tight(std::size_t nbytes, std::size_t skew, Random& random) : block_(new unsigned char[nbytes + skew]), skew_(skew) {
    for (std::size_t k = 0; k < nbytes + skew; k++) block_[k] = static_cast<unsigned char>(random.below(256));
  }
  unsigned char* data() const { return block_.get() + skew_; }

 private:
  std::unique_ptr<unsigned char[]> block_;
  std::size_t skew_;
};

// The definition: one bit after the other.
std::uint32_t reference(const unsigned char* data, std::size_t nbytes) {
  std::uint32_t state = 0xffffffffu;
  for (std::size_t k = 0; k < nbytes; k++) {
    state ^= data[k];
    for (int bit = 0; bit < 8; bit++) state = (state >> 1) ^ ((state & 1u) != 0 ? 0x82f63b78u : 0u);
  }
  return ~state;
}

void check_sums(std::size_t nbytes, std::size_t skew, Random& random) {
  const Tight bytes(nbytes, skew, random), copy(nbytes, skew, random);
  const unsigned char* data = bytes.data();
  const std::uint32_t expected = reference(data, nbytes);
  EXPECT(crc32c(data, nbytes, 0) == expected && crc32c(data, nbytes, 0, true) == expected);
  const std::size_t cut = random.below(nbytes + 1);
  const std::uint32_t head = crc32c(data, cut, 0), rest = crc32c(data + cut, nbytes - cut, 0);
  EXPECT(crc32c(data + cut, nbytes - cut, head) == expected);
  EXPECT(zerort::crc32c_combine(head, rest, nbytes - cut) == expected);
  const std::size_t grain = 1 + random.below(nbytes + 1), grains = (nbytes + grain - 1) / grain;
  std::vector<std::uint32_t> sums(grains);
  zerort::crc32c_grains(data, nbytes, grain, sums.data(), copy.data());
  EXPECT(std::memcmp(copy.data(), data, nbytes) == 0);
  for (std::size_t k = 0; k < grains; k++)
    EXPECT(sums[k] == reference(data + k * grain, std::min(grain, nbytes - k * grain)));
}

// Bounds and undefined behaviour alone: what the kernels compute is compared with NumPy's results elsewhere.
void run_each(std::size_t numel, Random& random) {
  const auto room = [&](Dtype dtype) { return Tight(numel * zerort::itemsize(dtype), zerort::itemsize(dtype), random); };
  for (unsigned a = 0; a < zerort::dtype_count; a++) {
    const auto to = Dtype(a);
    const Tight out = room(to), first = room(to), second = room(to), third = room(to);
    const void* sources[] = {first.data(), second.data(), third.data()};
    for (unsigned reduction = 0; reduction < zerort::reduction_count; reduction++)
      for (std::size_t count = 1; count <= 3; count++)
        zerort::reduce(to, zerort::Reduction(reduction), out.data(), sources, count, numel);
    if (zerort::is_float(to)) {
      zerort::first_nonfinite(to, first.data(), numel);
      zerort::square_sum(to, first.data(), numel);
    }
    for (unsigned b = 0; b < zerort::dtype_count; b++) {
      const auto from = Dtype(b);
      const Tight source = room(from);
      if (zerort::castable(to, from)) zerort::cast(to, out.data(), from, source.data(), numel);
      if (zerort::castable(to, from) && zerort::is_float(to)) zerort::copy_checked(to, out.data(), from, source.data(), numel);
      if (zerort::accumulable(to, from)) zerort::accumulate(to, out.data(), from, source.data(), numel);
    }
  }
}

template <typename T>
void optimize(std::size_t numel, Dtype dtype, Random& random) {
  for (unsigned g = 0; g < zerort::dtype_count; g++) {
    const auto grad_dtype = Dtype(g);
    if (!zerort::updates_with(dtype, grad_dtype)) continue;
    const auto room = [&](std::size_t width) { return Tight(numel * width, width, random); };
    const Tight param = room(sizeof(T)), grad = room(zerort::itemsize(grad_dtype)), copy = room(2);
    const Tight state1 = room(sizeof(T)), state2 = room(sizeof(T));
    auto* exp_avg = reinterpret_cast<T*>(state1.data());
    const bool copies = zerort::copies_into(dtype, Dtype::bfloat16);
    const zerort::Update<T> update = {reinterpret_cast<T*>(param.data()), grad.data(), grad_dtype,
                                      copies ? copy.data() : nullptr, copies ? Dtype::bfloat16 : Dtype::uint8, numel};
    zerort::adamw<T>(update, exp_avg, reinterpret_cast<T*>(state2.data()), {});
    zerort::sgd<T>(update, exp_avg, zerort::Momentum::later, true, {});
    zerort::sgd<T>(update, nullptr, zerort::Momentum::none, false, {});
    zerort::lion<T>(update, exp_avg, {});
  }
}

}  // namespace

void sum_up(const Trial& trial, Figures& figures) {
  const int times = trial.rounds / 2 + 20;
  on_ranks(trial.size, [&](int rank) {
    Random random(mix(trial.seed + 3) + unsigned(rank));
    for (int k = 0; k < times; k++) check_sums(random.below(k % 16 == 0 ? 3 * 4096 + 1500 : 900), random.below(16), random);
  });
  if (trial.fault == Fault::overflow) {
    Random random(1);
    crc32c(Tight(100, 3, random).data(), 101, 0);
  }
  figures["checksums"] += std::uint64_t(times * trial.size);
}

void run_kernels(const Trial& trial, Figures& figures) {
  Random random(trial.seed);
  for (int k = 0; k < trial.rounds / 16 + 4; k++) {
    const std::size_t numel = k < 3 ? std::size_t(k) : random.below(600);
    run_each(numel, random);
    optimize<float>(numel, Dtype::float32, random);
    optimize<double>(numel, Dtype::float64, random);
    figures["kernels"] += 1;
  }
  // Pages are touched while another rank stores into them: nothing that it stored is undone.
  const Mapping window(64 * 4096);
  on_ranks(2, [&](int rank) {
    if (rank == 0) {
      for (int k = 0; k < 20; k++) zerort::touch(window.data(), 64 * 4096);
      return;
    }
    for (int value = 1; value < 20; value++)
      for (int page = 0; page < 64; page++) {
        auto* byte = reinterpret_cast<unsigned char*>(window.data()) + page * 4096;
        __atomic_store_n(byte, static_cast<unsigned char>(value), __ATOMIC_RELAXED);
        EXPECT(__atomic_load_n(byte, __ATOMIC_RELAXED) == value);
      }
  });
}

void ring_doorbells(const Trial& trial, Figures& figures) {
  const int pieces = trial.rounds / 4 + 8;
  zerort::Doorbell bell(1e-5);
  std::mutex lock;
  int left = 0, done = 0;
  const auto take = [&] {
    const std::lock_guard<std::mutex> hold(lock);
    if (left == 0) return;
    left--;
    done++;
    bell.answer();
  };
  // Rank 0 sleeps until there is work that nobody took; the others bring it and take some of it back.
  on_ranks(trial.size, [&](int rank) {
    Random random(trial.seed + unsigned(rank));
    const int all = pieces * (trial.size - 1);
    for (int k = 0; k < pieces && rank > 0; k++) {
      {
        const std::lock_guard<std::mutex> hold(lock);
        left++;
        bell.ring();
      }
      stumble(random);
      if (random.below(2) == 0 && k + 1 < pieces) take();  // the last piece of each is the worker's
    }
    for (bool more = rank == 0; more;) {
      bell.wait();
      take();
      const std::lock_guard<std::mutex> hold(lock);
      more = done < all;
    }
  });
  EXPECT(left == 0 && done == pieces * (trial.size - 1));
  figures["pieces"] += std::uint64_t(done);
}

}  // namespace harness
