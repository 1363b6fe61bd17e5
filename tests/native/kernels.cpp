// Checksums against a bitwise reference, every kernel over arrays that end where their memory ends, and doorbells.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "accumulate.h"
#include "blocks.h"
#include "cast.h"
#include "changes.h"
#include "crc32c.h"
#include "doorbell.h"
#include "finite.h"
#include "harness.h"
#include "masters.h"
#include "memory.h"
#include "moments.h"
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

// Blocks and changes; positions that were made up are refused or stay within the target.
void run_codecs(std::size_t numel, Random& random) {
  for (const int bits : {8, 4}) {
    const std::size_t blocks = (numel + zerort::block_numel(bits) - 1) / zerort::block_numel(bits);
    const Tight source(numel * 4, 4, random), scales(blocks * zerort::scale_nbytes(bits), 4, random);
    const Tight base(numel * 4, 4, random);
    const Tight codes(zerort::code_nbytes(bits, numel), 1, random), out(numel * 4, 4, random);
    for (const bool differs : {false, true}) {
      const float* below = differs ? reinterpret_cast<const float*>(base.data()) : nullptr;
      for (const bool stochastic : {false, true})
        zerort::encode_blocks(bits, reinterpret_cast<const float*>(source.data()), below, numel, 0, {stochastic, 1, 2},
                              scales.data(), codes.data());
      zerort::decode_blocks(bits, reinterpret_cast<float*>(out.data()), numel, scales.data(), codes.data(), differs);
    }
  }
  for (const std::size_t width : {1, 2, 4, 8}) {
    const Tight base(numel * width, width, random), now(numel * width, width, random), planes(numel * width, 1, random);
    std::memcpy(now.data(), base.data(), numel / 2 * width);  // half of it is the same
    const zerort::Changes found = zerort::find_changes(base.data(), now.data(), numel, width);
    const Tight gaps(found.gap_nbytes, 1, random), bitmap((numel + 7) / 8, 1, random);
    const Tight values(found.changed * width, width, random);
    EXPECT(zerort::write_gaps(base.data(), now.data(), numel, width, found, gaps.data(), values.data()));
    EXPECT(zerort::apply_gaps(base.data(), numel, width, found, gaps.data(), values.data()));
    EXPECT(std::memcmp(base.data(), now.data(), numel * width) == 0);
    const Tight other(numel * width, width, random);
    const zerort::Changes more = zerort::find_changes(now.data(), other.data(), numel, width);
    const Tight fresh(more.changed * width, width, random);
    EXPECT(zerort::write_bitmap(now.data(), other.data(), numel, width, more, bitmap.data(), fresh.data()));
    EXPECT(zerort::apply_bitmap(base.data(), numel, width, more, bitmap.data(), fresh.data()));
    EXPECT(std::memcmp(base.data(), other.data(), numel * width) == 0);
    const Tight made_up(found.gap_nbytes, 1, random), bits((numel + 7) / 8, 1, random);
    zerort::apply_gaps(base.data(), numel, width, found, made_up.data(), values.data());
    zerort::apply_bitmap(base.data(), numel, width, found, bits.data(), values.data());
    zerort::split_planes(planes.data(), now.data(), numel, width);
    zerort::join_planes(base.data(), planes.data(), numel, width);
    EXPECT(std::memcmp(base.data(), now.data(), numel * width) == 0);
  }
}

template <typename T>
void optimize_each(const zerort::Update<T>& update, T* exp_avg, T* exp_avg_sq) {
  zerort::adamw<T>(update, exp_avg, exp_avg_sq, {});
  zerort::sgd<T>(update, exp_avg, zerort::Momentum::later, true, {});
  zerort::sgd<T>(update, nullptr, zerort::Momentum::none, false, {});
  zerort::lion<T>(update, exp_avg, {});
}

template <typename T>
void optimize(std::size_t numel, Dtype dtype, Random& random) {
  for (unsigned g = 0; g < zerort::dtype_count; g++) {
    const auto grad_dtype = Dtype(g);
    if (!zerort::updates_with(dtype, grad_dtype)) continue;
    const auto room = [&](std::size_t width) { return Tight(numel * width, width, random); };
    const Tight param = room(sizeof(T)), grad = room(zerort::itemsize(grad_dtype)), copy = room(2);
    const Tight state1 = room(sizeof(T)), state2 = room(sizeof(T)), half = room(2);
    auto* exp_avg = reinterpret_cast<T*>(state1.data());
    auto* exp_avg_sq = reinterpret_cast<T*>(state2.data());
    auto* master = reinterpret_cast<T*>(param.data());
    const bool copies = zerort::copies_into(dtype, Dtype::bfloat16);
    void* out = copies ? copy.data() : nullptr;
    const Dtype out_dtype = copies ? Dtype::bfloat16 : Dtype::uint8;
    optimize_each<T>({master, nullptr, grad.data(), grad_dtype, out, out_dtype, numel}, exp_avg, exp_avg_sq);
    if (!copies) continue;
    auto* remainder = reinterpret_cast<std::uint16_t*>(half.data());
    optimize_each<T>({nullptr, remainder, grad.data(), grad_dtype, out, out_dtype, numel}, exp_avg, exp_avg_sq);
  }
}

// A master weight comes back whole from its halves; moments are written and read within their blocks.
void code_state(std::size_t numel, Random& random) {
  const Tight source(numel * 4, 4, random), param(numel * 2, 2, random), remainder(numel * 2, 2, random);
  const Tight back(numel * 4, 4, random);
  auto* master = reinterpret_cast<float*>(source.data());
  for (std::size_t k = 0; k < numel; k++) master[k] = float(random.below(20001)) / 16.0f - 600.0f;
  auto* upper = reinterpret_cast<std::uint16_t*>(param.data());
  auto* lower = reinterpret_cast<std::uint16_t*>(remainder.data());
  auto* joined = reinterpret_cast<float*>(back.data());
  zerort::split_master(upper, nullptr, master, numel);
  zerort::split_master(upper, lower, master, numel);
  zerort::join_master(joined, upper, lower, numel);
  EXPECT(std::memcmp(joined, master, numel * 4) == 0);
  const Tight payload((numel + zerort::moment_block - 1) / zerort::moment_block * zerort::moment_nbytes, 4, random);
  for (const bool is_signed : {true, false}) {
    for (std::size_t k = 0; k < numel && !is_signed; k++) master[k] = master[k] < 0 ? -master[k] : master[k];
    zerort::encode_moments(payload.data(), master, numel, is_signed, 0, 1, 2);
    zerort::decode_moments(joined, payload.data(), numel, is_signed);
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
    run_codecs(numel, random);
    optimize<float>(numel, Dtype::float32, random);
    optimize<double>(numel, Dtype::float64, random);
    code_state(numel, random);
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
