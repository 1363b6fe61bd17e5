// Atomics: streams run at the same time on different host threads, so these are real ones. Recorded as writes.
#pragma once

template <class T, class Change>
__attribute__((no_sanitize("thread"))) T cusim_update(T *pointer, Change change) {
  typedef typename std::conditional<
      sizeof(T) == 8, unsigned long long,
      typename std::conditional<sizeof(T) == 4, unsigned, unsigned short>::type>::type Bits;
  cusim_atomic_access(pointer, sizeof(T));
  Bits before, after;
  T value, changed;
  __atomic_load((Bits *)pointer, &before, __ATOMIC_SEQ_CST);
  do {
    memcpy(&value, &before, sizeof before);
    changed = change(value);
    memcpy(&after, &changed, sizeof after);
  } while (!__atomic_compare_exchange((Bits *)pointer, &before, &after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return value;
}

#define CUSIM_ATOMICS(T)                                                                                   \
  inline T atomicAdd(T *p, T v) { return cusim_update(p, [=](T old) { return (T)(old + v); }); }           \
  inline T atomicExch(T *p, T v) { return cusim_update(p, [=](T) { return v; }); }
#define CUSIM_INTEGER_ATOMICS(T)                                                                           \
  CUSIM_ATOMICS(T)                                                                                         \
  inline T atomicSub(T *p, T v) { return cusim_update(p, [=](T old) { return (T)(old - v); }); }           \
  inline T atomicCAS(T *p, T expected, T v) { return cusim_update(p, [=](T old) { return old == expected ? v : old; }); } \
  inline T atomicMax(T *p, T v) { return cusim_update(p, [=](T old) { return old > v ? old : v; }); }      \
  inline T atomicMin(T *p, T v) { return cusim_update(p, [=](T old) { return old < v ? old : v; }); }      \
  inline T atomicAnd(T *p, T v) { return cusim_update(p, [=](T old) { return (T)(old & v); }); }           \
  inline T atomicOr(T *p, T v) { return cusim_update(p, [=](T old) { return (T)(old | v); }); }            \
  inline T atomicXor(T *p, T v) { return cusim_update(p, [=](T old) { return (T)(old ^ v); }); }
CUSIM_ATOMICS(float)
CUSIM_ATOMICS(double)
CUSIM_INTEGER_ATOMICS(int)
CUSIM_INTEGER_ATOMICS(unsigned)
CUSIM_INTEGER_ATOMICS(unsigned long long)
inline unsigned short atomicCAS(unsigned short *p, unsigned short expected, unsigned short v) {
  return cusim_update(p, [=](unsigned short old) { return old == expected ? v : old; });
}
inline unsigned atomicInc(unsigned *p, unsigned limit) {
  return cusim_update(p, [=](unsigned old) { return old >= limit ? 0u : old + 1; });
}
inline unsigned atomicDec(unsigned *p, unsigned limit) {
  return cusim_update(p, [=](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}
