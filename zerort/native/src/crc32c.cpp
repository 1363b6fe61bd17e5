// A state is a polynomial over GF(2) modulo the Castagnoli polynomial, bits reversed: the highest bit is x^0. Appending
// n zero bytes multiplies it by x^(8n); since that is linear, ranges can be summed up apart and put together
// afterwards.
#include "crc32c.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define ZERORT_CRC_INSTRUCTION 1
#endif

namespace zerort {
namespace {

constexpr std::uint32_t polynomial = 0x82f63b78u;
constexpr std::uint32_t one = 0x80000000u;

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1u) ? polynomial : 0u); }

std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1, b = times_x(b))
    if (a & one) product ^= b;
  return product;
}

// x^(8 * nbytes)
std::uint32_t power_of(std::uint64_t nbytes) {
  std::uint32_t result = one;
  for (std::uint32_t base = one >> 8; nbytes != 0; nbytes >>= 1, base = multiply(base, base))
    if (nbytes & 1u) result = multiply(result, base);
  return result;
}

// Little-endian whatever the machine; compilers turn it into one load where they can.
std::uint32_t load32(const unsigned char* p) {
  const std::uint32_t b0 = p[0], b1 = p[1], b2 = p[2], b3 = p[3];
  return b0 | b1 << 8 | b2 << 16 | b3 << 24;
}

// entry[k][b]: the state left by byte b followed by k zero bytes.
struct SlicingTable {
  std::uint32_t entry[16][256];

  SlicingTable() {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t state = byte;
      for (int bit = 0; bit < 8; ++bit) state = times_x(state);
      entry[0][byte] = state;
    }
    for (int k = 1; k < 16; ++k)
      for (int byte = 0; byte < 256; ++byte) {
        const std::uint32_t before = entry[k - 1][byte];
        entry[k][byte] = (before >> 8) ^ entry[0][before & 0xffu];
      }
  }
};

std::uint32_t update_portable(std::uint32_t state, const unsigned char* p, std::size_t nbytes) {
  static const SlicingTable table;
  const auto& t = table.entry;
  for (; nbytes >= 16; p += 16, nbytes -= 16) {
    std::uint32_t next = 0;
    for (int word = 0; word < 4; ++word) {
      const std::uint32_t w = load32(p + 4 * word) ^ (word == 0 ? state : 0u);
      const int k = 15 - 4 * word;
      next ^= t[k][w & 0xffu] ^ t[k - 1][(w >> 8) & 0xffu] ^ t[k - 2][(w >> 16) & 0xffu] ^ t[k - 3][w >> 24];
    }
    state = next;
  }
  for (; nbytes != 0; ++p, --nbytes) state = (state >> 8) ^ t[0][(state ^ *p) & 0xffu];
  return state;
}

#ifdef ZERORT_CRC_INSTRUCTION

// The one exception to "no intrinsics" in this module: no compiler finds this instruction in plain C++, and tables
// reach about 3 GB/s where it reaches 20 and more. Its latency is three cycles and its rate one per cycle, hence three
// streams.
template <std::size_t stride>
struct ShiftTable {
  std::uint32_t entry[4][256];

  ShiftTable() {
    const std::uint32_t power = power_of(stride);
    for (int k = 0; k < 4; ++k)
      for (std::uint32_t byte = 0; byte < 256; ++byte) entry[k][byte] = multiply(power, byte << (8 * k));
  }

  // The state after `stride` zero bytes more.
  std::uint32_t operator()(std::uint32_t state) const {
    return entry[0][state & 0xffu] ^ entry[1][(state >> 8) & 0xffu] ^ entry[2][(state >> 16) & 0xffu] ^
           entry[3][state >> 24];
  }
};

inline std::uint64_t load64(const unsigned char* p) {
  std::uint64_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

template <std::size_t stride>
__attribute__((target("sse4.2"))) std::uint64_t update_streams(std::uint64_t state, const unsigned char*& p,
                                                               std::size_t& nbytes) {
  static const ShiftTable<stride> shift;
  for (; nbytes >= 3 * stride; p += 3 * stride, nbytes -= 3 * stride) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t i = 0; i < stride; i += 8) {
      state = __builtin_ia32_crc32di(state, load64(p + i));
      second = __builtin_ia32_crc32di(second, load64(p + stride + i));
      third = __builtin_ia32_crc32di(third, load64(p + 2 * stride + i));
    }
    state = shift(shift(static_cast<std::uint32_t>(state)) ^ static_cast<std::uint32_t>(second)) ^ third;
  }
  return state;
}

__attribute__((target("sse4.2"))) std::uint32_t update_instruction(std::uint32_t start, const unsigned char* p,
                                                                   std::size_t nbytes) {
  std::uint64_t state = start;
  state = update_streams<4096>(state, p, nbytes);
  state = update_streams<256>(state, p, nbytes);
  for (; nbytes >= 8; p += 8, nbytes -= 8) state = __builtin_ia32_crc32di(state, load64(p));
  auto rest = static_cast<std::uint32_t>(state);
  for (; nbytes != 0; ++p, --nbytes) rest = __builtin_ia32_crc32qi(rest, *p);
  return rest;
}

#endif

using UpdateLoop = std::uint32_t (*)(std::uint32_t, const unsigned char*, std::size_t);

UpdateLoop choose() {
#ifdef ZERORT_CRC_INSTRUCTION
  __builtin_cpu_init();
  if (__builtin_cpu_supports("sse4.2")) return update_instruction;
#endif
  return update_portable;
}

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value, bool portable) {
  static const UpdateLoop fastest = choose();
  const UpdateLoop update = portable ? update_portable : fastest;
  return ~update(~value, static_cast<const unsigned char*>(data), nbytes);
}

void crc32c_grains(const void* data, std::size_t nbytes, std::size_t grain, std::uint32_t* sums, void* copy) {
  const auto* from = static_cast<const unsigned char*>(data);
  auto* to = static_cast<unsigned char*>(copy);
  for (std::size_t at = 0; at < nbytes; at += grain) {
    const std::size_t length = nbytes - at < grain ? nbytes - at : grain;
    *sums++ = crc32c(from + at, length, 0);
    if (to != nullptr) std::memcpy(to + at, from + at, length);
  }
}

std::uint32_t crc32c_combine(std::uint32_t a, std::uint32_t b, std::uint64_t length_of_b) {
  return multiply(power_of(length_of_b), a) ^ b;
}

}  // namespace zerort
