// Elements whose bits differ from a base, or are not zero, and where they are, on the GPU; `changes_cuda.py` launches
// these. The definition is native/reference/changes.py, the host's form native/src/changes.cpp: the same bytes.
//
//   1  mark_*    a warp looks at a stretch: how many values it has, where the first and the last are, bytes of gaps
//   2  scan      one block turns that into what comes before each stretch
//   3  write_*   the warp looks again, and knows where its values and positions go
//
// A stretch is 2,048 elements, or the 256 bytes of positions that as many take as a bitmap; gaps are taken only if they
// are no longer than that. So there are as many stretches either way.
typedef long long Index;
typedef unsigned char Byte;

#define ALL_LANES 0xffffffffu
#define STRETCH 2048
#define ESCAPE 255
#define THREADS 256  // of the block that scans

enum Way { kGaps = 0, kBitmap = 1, kAll = 2 };  // as in delta.py

struct Header {
  Byte way, width, rest[6];
  Index numel, count;
};

// Before the scan: of a stretch. After it: of all that comes before.
struct Mark {
  Index first, last;  // elements with a value; of none, both are -1
  Index count;        // values
  Index sum;          // bytes of their gaps but the first one's; or elements that gaps pass over
};

__device__ inline Index warp_number() { return (blockIdx.x * (Index)blockDim.x + threadIdx.x) / 32; }

__device__ inline unsigned long long element(const void *array, int width, Index i) {
  if (!array) return 0;
  if (width == 1) return ((const Byte *)array)[i];
  if (width == 2) return ((const unsigned short *)array)[i];
  if (width == 4) return ((const unsigned *)array)[i];
  return ((const unsigned long long *)array)[i];
}

__device__ inline void set_element(void *array, int width, Index i, unsigned long long value) {
  if (width == 1) ((Byte *)array)[i] = (Byte)value;
  else if (width == 2) ((unsigned short *)array)[i] = (unsigned short)value;
  else if (width == 4) ((unsigned *)array)[i] = (unsigned)value;
  else ((unsigned long long *)array)[i] = value;
}

__device__ inline Index sum_of_warp(Index value) {
  for (int bits = 16; bits; bits /= 2) value += __shfl_xor_sync(ALL_LANES, value, bits);
  return value;
}

// The sum over this lane and those below.
__device__ inline Index sum_up_to(Index value, int lane) {
  for (int distance = 1; distance < 32; distance *= 2) {
    Index other = __shfl_up_sync(ALL_LANES, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// Which of 32 elements differ, as bits.
__device__ inline unsigned votes_at(Index numel, const void *base, const void *now, int width, Index i) {
  return __ballot_sync(ALL_LANES, i < numel && element(base, width, i) != element(now, width, i));
}

// Bytes of the gap before element `i`, if it has a value: of the elements from `begin` on `votes` have one.
__device__ inline Index gap_nbytes(unsigned votes, int lane, Index begin, Index last, Index *gap) {
  unsigned below = votes & ((1u << lane) - 1);
  *gap = begin + lane - 1 - (below ? begin + 31 - __clz((int)below) : last);
  return *gap / ESCAPE + 1;
}

extern "C" __global__ void mark_changes(Index numel, const void *base, const void *now, int width, Mark *marks) {
  Index number = warp_number(), begin = number * STRETCH;
  if (begin >= numel) return;  // the whole warp
  int lane = threadIdx.x % 32;
  Mark found = {-1, -1, 0, 0};
  Index nbytes = 0;  // this lane's
  for (int at = 0; at < STRETCH && begin + at < numel; at += 32) {
    unsigned votes = votes_at(numel, base, now, width, begin + at + lane);
    if (!votes) continue;
    Index gap, first = begin + at + __ffs((int)votes) - 1;
    if (votes >> lane & 1 && !(found.last < 0 && begin + at + lane == first)) {
      nbytes += gap_nbytes(votes, lane, begin + at, found.last, &gap);
    }
    if (found.first < 0) found.first = first;
    found.last = begin + at + 31 - __clz((int)votes);
    found.count += __popc(votes);
  }
  found.sum = sum_of_warp(nbytes);
  if (lane == 0) marks[number] = found;
}

__device__ inline unsigned bitmap_at(const Byte *bitmap, Index nbytes, Index i) {  // of 32 elements, the first being i
  unsigned votes = 0;
  for (int at = 0; at < 4; at++)
    if (i / 8 + at < nbytes) votes |= (unsigned)bitmap[i / 8 + at] << 8 * at;
  return votes;
}

// A payload's parts: a delta has a header (`headed`), else what it has are values and a bitmap of `numel` elements.
struct Parts {
  int way;
  Index count, nbytes;  // of values; of positions
  const Byte *values, *positions;
};

__device__ inline Parts parts_of(const Byte *payload, Index payload_nbytes, Index numel, int width, int headed) {
  Parts parts = {kBitmap, 0, (numel + 7) / 8, payload, payload};
  if (headed) {
    const Header *header = (const Header *)payload;
    parts.way = header->way;
    parts.count = header->count;
    parts.values = payload + sizeof(Header);
    parts.positions = parts.values + parts.count * width;
    parts.nbytes = payload + payload_nbytes - parts.positions;
  } else {
    parts.count = (payload_nbytes - parts.nbytes) / width;
    parts.positions = payload + parts.count * width;
  }
  return parts;
}

extern "C" __global__ void mark_positions(Index numel, const Byte *payload, Index payload_nbytes, int width, int headed,
                                          Mark *marks) {
  Index number = warp_number(), begin = number * (STRETCH / 8);
  if (number * STRETCH >= numel) return;
  int lane = threadIdx.x % 32;
  Parts parts = parts_of(payload, payload_nbytes, numel, width, headed);
  Index count = 0, passed = 0;
  for (int at = lane; at < STRETCH / 8 && begin + at < parts.nbytes; at += 32) {
    Byte one = parts.positions[begin + at];
    count += parts.way == kBitmap ? __popc(one) : one != ESCAPE;
    passed += one + (one != ESCAPE);
  }
  Mark found = {-1, -1, sum_of_warp(count), sum_of_warp(passed)};
  if (lane == 0) marks[number] = found;
}

// What `before` and what follows it are together. With `gaps`, the bytes of the gap between them count.
__device__ inline Mark joined(const Mark &before, const Mark &next, int gaps) {
  Mark both = {before.first, before.last, before.count + next.count, before.sum + next.sum};
  if (next.first < 0) return both;
  if (before.first < 0) both.first = next.first;
  else if (gaps) both.sum += (next.first - before.last - 1) / ESCAPE + 1;
  both.last = next.last;
  return both;
}

// One block: each thread joins a run of marks. The last mark, behind those of stretches, is of all of them.
extern "C" __global__ void scan_marks(Index stretches, Mark *marks, int gaps) {
  __shared__ Mark runs[THREADS];
  Index length = (stretches + THREADS - 1) / THREADS, begin = threadIdx.x * length;
  Index end = begin + length < stretches ? begin + length : stretches;
  Mark found = {-1, -1, 0, 0};
  for (Index at = begin; at < end; at++) found = joined(found, marks[at], gaps);
  runs[threadIdx.x] = found;
  __syncthreads();
  if (threadIdx.x == 0) {
    Mark all = {-1, -1, 0, 0};
    for (int run = 0; run < THREADS; run++) {
      Mark next = runs[run];
      runs[run] = all;
      all = joined(all, next, gaps);
    }
    marks[stretches] = all;
  }
  __syncthreads();
  found = runs[threadIdx.x];
  for (Index at = begin; at < end; at++) {
    Mark next = marks[at];
    marks[at] = found;
    found = joined(found, next, gaps);
  }
}

// Bytes of gaps are escapes until `write_changes` ends each gap; all values of a range that travels whole.
extern "C" __global__ void begin_payload(Index numel, const void *now, int width, int way, Index count, Index nbytes,
                                         Byte *payload) {
  Index i = blockIdx.x * (Index)blockDim.x + threadIdx.x;
  Byte *values = payload + sizeof(Header);
  if (i == 0) {
    Header header = {(Byte)way, (Byte)width, {0, 0, 0, 0, 0, 0}, numel, count};
    *(Header *)payload = header;
  }
  if (way == kAll && i < numel) set_element(values, width, i, element(now, width, i));
  if (way == kGaps && i < nbytes) values[count * width + i] = ESCAPE;
}

// Not more than `count` values and `nbytes` of positions, whatever there is.
extern "C" __global__ void write_changes(Index numel, const void *base, const void *now, int width, const Mark *marks,
                                         int way, Byte *values, Index count, Index nbytes) {
  Index number = warp_number(), begin = number * STRETCH;
  if (begin >= numel) return;
  int lane = threadIdx.x % 32;
  Mark before = marks[number];
  Byte *positions = values + count * width;
  Index written = before.sum + (before.first < 0 ? 0 : before.first / ESCAPE + 1);  // the first gap is from -1 on
  for (int at = 0; at < STRETCH && begin + at < numel; at += 32) {
    Index i = begin + at + lane, gap = 0;
    unsigned votes = votes_at(numel, base, now, width, i);
    bool mine = votes >> lane & 1;
    if (way == kBitmap && lane < 4 && (begin + at) / 8 + lane < nbytes)
      positions[(begin + at) / 8 + lane] = (Byte)(votes >> 8 * lane);
    if (!votes) continue;
    Index value = before.count + __popc(votes & ((1u << lane) - 1));
    if (mine && value < count) set_element(values, width, value, element(now, width, i));
    if (way == kGaps) {
      Index length = mine ? gap_nbytes(votes, lane, begin + at, before.last, &gap) : 0;
      Index end = written + sum_up_to(length, lane);
      if (mine && end <= nbytes) positions[end - 1] = (Byte)(gap % ESCAPE);
      written = __shfl_sync(ALL_LANES, end, 31);
    }
    before.last = begin + at + 31 - __clz((int)votes);
    before.count += __popc(votes);
  }
}

// Put values to their places; with `fill`, zeros to all others.
extern "C" __global__ void apply_positions(Index numel, void *out, const Byte *payload, Index payload_nbytes, int width,
                                           int headed, int fill, const Mark *marks) {
  Index number = warp_number(), begin = number * STRETCH;
  if (begin >= numel) return;
  int lane = threadIdx.x % 32;
  Parts parts = parts_of(payload, payload_nbytes, numel, width, headed);
  if (parts.way == kAll) {
    for (int at = lane; at < STRETCH && begin + at < numel; at += 32)
      set_element(out, width, begin + at, element(parts.values, width, begin + at));
    return;
  }
  Mark before = marks[number];
  if (parts.way == kBitmap) {
    for (int at = 0; at < STRETCH && begin + at < numel; at += 32) {
      unsigned votes = bitmap_at(parts.positions, parts.nbytes, begin + at);
      Index i = begin + at + lane, value = before.count + __popc(votes & ((1u << lane) - 1));
      bool mine = votes >> lane & 1 && value < parts.count;
      if (i < numel && (mine || fill)) set_element(out, width, i, mine ? element(parts.values, width, value) : 0);
      before.count += __popc(votes);
    }
    return;
  }
  for (int at = 0; at < STRETCH / 8; at += 32) {
    Index position = number * (STRETCH / 8) + at + lane;
    Byte one = position < parts.nbytes ? parts.positions[position] : ESCAPE;
    bool ends = one != ESCAPE;
    Index i = before.sum + sum_up_to(position < parts.nbytes ? one + ends : 0, lane) - 1;
    unsigned votes = __ballot_sync(ALL_LANES, ends);
    Index value = before.count + __popc(votes & ((1u << lane) - 1));
    if (ends && i < numel && value < parts.count) set_element(out, width, i, element(parts.values, width, value));
    before.sum = __shfl_sync(ALL_LANES, i, 31) + 1;
    before.count += __popc(votes);
  }
}
