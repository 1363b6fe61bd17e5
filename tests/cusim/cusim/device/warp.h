// Barriers, and what the lanes of a warp tell each other.
#pragma once

inline void __syncthreads() { cusim_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cusim_warp_barrier(mask); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

inline int __syncthreads_count(int predicate) {
  static thread_local int count;  // of the block: a block runs on one worker
  cusim_barrier();
  count = 0;
  cusim_barrier();
  count += predicate != 0;
  cusim_barrier();
  return count;
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }

// Every lane shows its value, waits for the others, and reads that of lane `from`.
template <class T>
T cusim_exchange(unsigned mask, T value, int from) {
  static_assert(sizeof(T) <= 16, "a lane shows at most 16 bytes");
  char *slots = cusim_where()->warp_exchange;
  memcpy(slots + cusim_where()->lane * 16, &value, sizeof value);
  cusim_warp_barrier(mask);
  T result = value;
  if (from >= 0 && from < 32) memcpy(&result, slots + from * 16, sizeof result);
  cusim_warp_barrier(mask);
  return result;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  int lane = cusim_where()->lane;
  return cusim_exchange(mask, value, (lane & ~(width - 1)) | (from & (width - 1)));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  int lane = cusim_where()->lane;
  return cusim_exchange(mask, value, (int)((lane & (width - 1)) + distance) < width ? lane + (int)distance : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  int lane = cusim_where()->lane;
  return cusim_exchange(mask, value, (lane & (width - 1)) >= (int)distance ? lane - (int)distance : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  int lane = cusim_where()->lane;
  bool same = ((lane ^ bits) & ~(width - 1)) == (lane & ~(width - 1));
  return cusim_exchange(mask, value, same ? lane ^ bits : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  char *slots = cusim_where()->warp_exchange;
  memcpy(slots + cusim_where()->lane * 16, &predicate, sizeof predicate);
  cusim_warp_barrier(mask);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; lane++) {
    int other = 0;
    if (mask >> lane & 1) memcpy(&other, slots + lane * 16, sizeof other);
    if (other) votes |= 1u << lane;
  }
  cusim_warp_barrier(mask);
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline unsigned __activemask() { return 0xffffffffu; }
