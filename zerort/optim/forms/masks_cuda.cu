// Masks of pruned elements, and what is decided from magnitudes, on the GPU; `masks_cuda.py` launches these. The
// definition is masks.py. Magnitudes are bits without the sign; sums are of whole numbers, so the order does not matter.
typedef long long Index;
typedef unsigned long long Bits;
typedef unsigned char Byte;

__device__ inline Index this_element() { return blockIdx.x * (Index)blockDim.x + threadIdx.x; }

__device__ inline bool is_marked(const Byte *mask, Index i) { return mask[i / 8] >> i % 8 & 1; }

__device__ inline Bits magnitude(const void *values, int width, Index i) {
  if (width == 2) return ((const unsigned short *)values)[i] & 0x7fffu;
  if (width == 4) return ((const unsigned *)values)[i] & 0x7fffffffu;
  return ((const Bits *)values)[i] & 0x7fffffffffffffffull;
}

// By their magnitudes; or, of those with the magnitude `threshold`, by their indices.
extern "C" __global__ void add_histogram(Index numel, Bits *counts, const void *values, int width, const Byte *mask,
                                         int by_index, Bits threshold, int shift, int digits, int has_prefix,
                                         Bits prefix) {
  __shared__ unsigned local[BINS];
  for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) local[bin] = 0;
  __syncthreads();
  for (Index i = this_element(); i < numel; i += (Index)gridDim.x * blockDim.x) {
    if (is_marked(mask, i)) continue;
    Bits key = magnitude(values, width, i);
    if (by_index && key != threshold) continue;
    if (by_index) key = (Bits)i;
    if (has_prefix && key >> (shift + digits) != prefix) continue;
    atomicAdd(&local[key >> shift & ((1u << digits) - 1)], 1u);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < 1 << digits; bin += blockDim.x)
    if (local[bin]) atomicAdd(&counts[bin], (Bits)local[bin]);
}

// A thread to each byte of the mask. Of those that equal the threshold, the ones before element `end`.
extern "C" __global__ void mark_smallest(Index numel, Byte *mask, const void *values, int width, Bits threshold,
                                         Index end) {
  Index first = this_element() * 8;
  if (first >= numel) return;
  Byte octet = mask[first / 8];
  for (int bit = 0; bit < 8 && first + bit < numel; bit++) {
    Bits key = magnitude(values, width, first + bit);
    if (key < threshold || (key == threshold && first + bit < end)) octet |= 1 << bit;
  }
  mask[first / 8] = octet;
}

extern "C" __global__ void mark_two_of_four(Index numel, Byte *mask, const void *values, int width) {
  Index first = this_element() * 8;
  if (first >= numel) return;
  Byte octet = mask[first / 8], before = octet;
  for (int group = 0; group < 8 && first + group < numel; group += 4) {
    Bits keys[4];
    for (int i = 0; i < 4; i++)
      keys[i] = before >> (group + i) & 1 ? ~0ull : magnitude(values, width, first + group + i);
    for (int i = 0; i < 4; i++) {
      int smaller = 0;
      for (int other = 0; other < 4; other++) smaller += keys[other] < keys[i] || (keys[other] == keys[i] && other < i);
      if (smaller < 2) octet |= 1 << (group + i);
    }
  }
  mask[first / 8] = octet;
}

extern "C" __global__ void zero_marked(Index numel, void *values, int width, const Byte *mask) {
  Index i = this_element();
  if (i >= numel || !is_marked(mask, i)) return;
  if (width == 2) ((unsigned short *)values)[i] = 0;
  else if (width == 4) ((unsigned *)values)[i] = 0;
  else ((Bits *)values)[i] = 0;
}
