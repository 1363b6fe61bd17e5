#include "copy.h"

#include <cstring>
#include <memory>
#include <vector>

#include "memory.h"
#include "report.h"
#include "status.h"
#include "stream.h"

namespace cusim {

namespace {

size_t extent(const Rows &rows, size_t pitch) { return (rows.height - 1) * pitch + rows.width; }

void move_rows(void *to, const void *from, const Rows &rows) {
  for (size_t row = 0; row < rows.height; row++)
    memmove((char *)to + row * rows.to_pitch, (const char *)from + row * rows.from_pitch, rows.width);
}

std::vector<Access> row_accesses(const void *pointer, const Rows &rows, size_t pitch, bool write) {
  std::vector<Access> found;
  if (pitch == rows.width) return {write ? writes(pointer, rows.width * rows.height) : reads(pointer, rows.width * rows.height)};
  for (size_t row = 0; row < rows.height; row++) {
    const char *start = (const char *)pointer + row * pitch;
    found.push_back(write ? writes(start, rows.width) : reads(start, rows.width));
  }
  return found;
}

const char *side(Kind kind) {
  switch (kind) {
    case Kind::kDevice: return "device";
    case Kind::kPinned: return "pinned";
    case Kind::kManaged: return "managed";
    default: return "pageable";
  }
}

}  // namespace

int copy_rows(void *to, const void *from, const Rows &rows, const void *handle, bool asynchronous) {
  if (!rows.width || !rows.height) return kSuccess;
  size_t to_extent = extent(rows, rows.to_pitch), from_extent = extent(rows, rows.from_pitch);
  Kind to_kind, from_kind;
  if (!to || !from) return kInvalidValue;
  if (!within_bounds(to, to_extent, "a copy's destination", &to_kind)) return kInvalidValue;
  if (!within_bounds(from, from_extent, "a copy's source", &from_kind)) return kInvalidValue;
  StreamPointer stream = find_stream(handle);
  if (!stream) return kInvalidHandle;

  // Pageable memory is the host's own: the host reads it before it goes on, or waits until it is written.
  std::vector<Access> accesses;
  auto add = [&](std::vector<Access> more) { accesses.insert(accesses.end(), more.begin(), more.end()); };
  if (from_kind != Kind::kPageable) add(row_accesses(from, rows, rows.from_pitch, false));
  if (to_kind != Kind::kPageable) add(row_accesses(to, rows, rows.to_pitch, true));
  std::string name = text("copy of %zu bytes (%s to %s)", rows.width * rows.height, side(from_kind), side(to_kind));

  void *target = worker_view(to);
  if (asynchronous && from_kind == Kind::kPageable && to_kind != Kind::kPageable) {
    auto staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + from_extent);
    submit(stream, name, accesses, [=](Operation &) { move_rows(target, staged->data(), rows); });
    return kSuccess;
  }
  const void *source = worker_view(from);
  submit(stream, name, accesses, [=](Operation &) { move_rows(target, source, rows); });
  bool between_devices = to_kind == Kind::kDevice && from_kind == Kind::kDevice;
  if (to_kind == Kind::kPageable || (!asynchronous && !between_devices)) synchronize(stream);
  return kSuccess;
}

int copy(void *to, const void *from, size_t size, const void *stream, bool asynchronous) {
  return copy_rows(to, from, {size, 1, size, size}, stream, asynchronous);
}

int fill(void *to, int value, size_t size, const void *handle) {
  if (!size) return kSuccess;
  Kind kind;
  if (!within_bounds(to, size, "a fill", &kind) || kind == Kind::kPageable) return kInvalidValue;
  StreamPointer stream = find_stream(handle);
  if (!stream) return kInvalidHandle;
  void *target = worker_view(to);
  submit(stream, text("fill of %zu bytes", size), {writes(to, size)}, [=](Operation &) { memset(target, value, size); });
  return kSuccess;
}

}  // namespace cusim

// For `cusim.frees`: memory goes back to a pool, which gives it out again in the order of this stream. Poisoned at once or not
// at all: later, someone who has every right to the memory may have it.
extern "C" void cusim_freed(void *pointer, size_t size, int device, const void *handle) {
  cusim::Kind kind;
  cusim::StreamPointer stream = cusim::find_stream(device, handle);
  if (!stream || !cusim::within_bounds(pointer, size, "a freed array", &kind)) return;
  if (cusim::is_idle(stream)) cusim::poison(cusim::worker_view(pointer), size);
  cusim::submit(stream, cusim::text("free of an array of %zu bytes", size), {cusim::frees(pointer, size)}, [](cusim::Operation &) {});
}
