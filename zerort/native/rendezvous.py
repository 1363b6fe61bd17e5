"""`Rendezvous` without a compiler: the form in Python of ``src/rendezvous.cpp``, and how to read what ranks left there.

Both forms have the same verbs and the same layout in shared memory (drawn in ``src/rendezvous.h``). All ranks of a node
use the same form: this one has no atomic counter, so whoever sees that all have arrived moves the epoch for all. It
polls, cannot read memory that is not shared, and relies on stores being seen in their order: on x86-64 they are
(decisions 0007, 0072).
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerort.native.dtypes import DTYPE_CODES, REDUCTION_CODES, Array, numpy_dtype
from zerort.native.extension import kernels
from zerort.native.reference import reduce_into

__all__ = [
    "AGREED_BYTES",
    "BROKEN",
    "DISAGREE",
    "HEADER_BYTES",
    "MEETING",
    "MET",
    "MOVES",
    "PARTING",
    "PRIVATE",
    "WAITING",
    "PythonRendezvous",
    "SlotView",
    "allow_reading",
    "can_read",
    "control_nbytes",
    "disallow_reading",
    "is_alive",
    "open_log",
    "open_rendezvous",
    "open_repeater",
    "prepare",
    "read_header",
    "read_slot",
]

HEADER_BYTES = 192
AGREED_BYTES = 96
PRIVATE = -1
MET, WAITING, DISAGREE, BROKEN = range(4)
MEETING, PARTING = 8, 16
"""How far a native ``PreparedCall`` came: one of these, and a status added."""
MOVES = ("nothing", "copy", "reduce", "all_reduce")
"""What a native ``PreparedCall`` does between meeting and parting, by number."""

_LINE = 64
_CONTROL_BYTES = 4 * _LINE
_EPOCH, _BROKEN_WORD = _LINE, 3 * _LINE
_SLOT_BYTES = 512
_CALLS = _LINE
_CALL_BYTES = 32 + HEADER_BYTES
_HERE, _LEFT, _GAVE_UP = 1, 2, 3

_NAMES = {code: name for name, code in DTYPE_CODES.items()}
_REDUCTIONS = {code: name for name, code in REDUCTION_CODES.items()}


def control_nbytes(size: int) -> int:
    """Return the bytes of shared memory in which ``size`` ranks meet."""
    return _CONTROL_BYTES + size * _SLOT_BYTES


def open_rendezvous(control: int, *, rank: int, size: int, spins: int, yields: int, in_native: bool) -> Any:
    """Return this rank's side of the meeting place at address ``control``."""
    form: Any = PythonRendezvous
    if in_native:
        assert kernels is not None
        form = kernels.Rendezvous
    return form(control, rank, size, spins, yields)


def open_log(length: int, *, in_native: bool) -> Any:
    """Return a native record of the last ``length`` prepared calls; None where there are none."""
    return kernels.CallLog(length) if in_native and kernels is not None else None


def prepare(link: Any, log: Any, *, make: Any, **call: Any) -> Any:
    """Return a native `PreparedCall` (``src/prepared.cpp``), whose ``run`` makes the call in one step.

    Args:
        link: The native rendezvous.
        log: Where it notes its runs.
        make: Returns a new array for the result, if the caller gives no out; else None.
        call: The rest, by the names that are given there.
    """
    assert kernels is not None
    return kernels.PreparedCall(link, log, **call, make=make, weak_references=weakref.getweakrefcount)


def open_repeater(**facts: Any) -> Callable[..., Any]:
    """Return what makes calls again that have native shortcuts: ``Repeater.again`` of ``src/repeater.cpp``.

    Args:
        facts: What it is made from, by the names that are given there.
    """
    assert kernels is not None
    return kernels.Repeater(**facts).again  # type: ignore[no-any-return]


_groups_that_read = 0


def allow_reading() -> None:
    """Let the other processes of this user read this one's memory, where the kernel wants to be asked.

    A group that asked says `disallow_reading` when it closes: after the last one nobody may any more.
    """
    global _groups_that_read
    _groups_that_read += 1
    if _groups_that_read == 1 and kernels is not None:
        kernels.allow_readers(allowed=True)


def disallow_reading() -> None:
    """Take one `allow_reading` back."""
    global _groups_that_read
    _groups_that_read -= 1
    if _groups_that_read == 0 and kernels is not None:
        kernels.allow_readers(allowed=False)


def can_read(pid: int, *, address: int, expected: int) -> bool:
    """Say whether this process may read that one's memory, by trying: 8 bytes there must be what they should."""
    return kernels is not None and bool(kernels.probe_reading(pid, address, expected))


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a rank's slot said at one moment."""

    arrived: bool
    """The rank has arrived at the meeting that the others wait for."""
    left: bool
    """The rank has closed the group, or its process has ended; not if it gave up waiting before."""
    died: bool
    """The process has ended without a word."""
    pid: int
    since: float
    """Seconds since the rank last arrived anywhere."""
    header: bytes | None
    """The last call it made; None if it has made none."""


def read_slot(control: memoryview, rank: int, *, sees_processes: bool) -> SlotView:
    """Read rank's slot; with ``sees_processes``, a rank whose process has gone counts as one that left."""
    base = _CONTROL_BYTES + rank * _SLOT_BYTES
    (epoch,) = struct.unpack_from("<I", control, _EPOCH)
    arrived, state, pid, meets, since_ns = struct.unpack_from("<IIIIQ", control, base)
    header = None
    if meets:
        first = base + _CALLS + (meets - 1) % 2 * _CALL_BYTES + 32
        header = bytes(control[first : first + HEADER_BYTES])
    died = state == _HERE and sees_processes and not is_alive(pid)
    return SlotView(
        arrived=arrived == (epoch + 1) % 2**32,
        left=state == _LEFT or died,
        died=died,
        pid=pid,
        since=(time.monotonic_ns() - since_ns) / 1e9,
        header=header,
    )


def read_header(control: memoryview, rank: int) -> bytes:
    """Return the header of the last call that a rank has shown."""
    base = _CONTROL_BYTES + rank * _SLOT_BYTES
    (meets,) = struct.unpack_from("<I", control, base + 12)
    first = base + _CALLS + (meets - 1) % 2 * _CALL_BYTES + 32
    return bytes(control[first : first + HEADER_BYTES])


def is_alive(pid: int) -> bool:
    """Say whether a process of this machine runs, or is stopped; one that ended and waits for its parent does not.

    Of one that cannot be looked at, for want of a file descriptor say, nothing bad is known.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


class PythonRendezvous:
    """The verbs of the native ``Rendezvous``; see there for what each promises."""

    def __init__(self, control: int, rank: int, size: int, spins: int, yields: int) -> None:
        self._memory = _bytes_at(control, control_nbytes(size))
        self._raw = memoryview(self._memory)  # type: ignore[arg-type]
        self._words = self._memory.view(np.uint32)
        self._rank = rank
        self._size = size
        self._yields = spins + yields
        self._windows: dict[int, int] = {}
        self._target = self._met = int(self._words[_EPOCH // 4])
        self._turn = 0
        self.half = 0  # of this rank's staging slab: the one that was used last
        self._comparing = False
        slot = self._slot(rank)
        self._words[slot + 2] = os.getpid()
        self._words[slot] = self._target
        self._stamp()
        self._words[slot + 1] = _HERE

    def map_window(self, window: int, base: int) -> None:
        """Say where this process has mapped ``window``."""
        self._windows[window] = base

    def meet(
        self, header: bytes, source_window: int, source_offset: int, out_window: int, out_offset: int, seconds: float
    ) -> int:
        """Say what this rank came for, and wait up to ``seconds`` for the others."""
        if len(header) != HEADER_BYTES:
            raise ValueError(f"Expected a packed header of {HEADER_BYTES} bytes, got {len(header)}.")
        slot = self._slot(self._rank)
        self._turn = int(self._words[slot + 3]) % 2
        first = self._call(self._rank)
        struct.pack_into("<qQqQ", self._raw, first, source_window, source_offset, out_window, out_offset)
        self._memory[first + 32 : first + _CALL_BYTES] = np.frombuffer(header, np.uint8)
        self._words[slot + 3] += 1
        self._comparing = True
        self._arrive()
        return self.wait(seconds)

    def unmap_window(self, window: int) -> None:
        """Say that this process has ``window`` no longer."""
        del self._windows[window]

    def part(self, seconds: float) -> int:
        """Wait until every rank has come this far too."""
        self._comparing = False
        self._arrive()
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """Wait up to ``seconds`` for whoever is still missing."""
        deadline = time.monotonic() + seconds
        polls = 0
        while int(self._words[_EPOCH // 4]) != self._target:
            # Any rank may see it: nobody comes to the next meeting before this rank does.
            if all(int(self._words[self._slot(r)]) == self._target for r in range(self._size)):
                self._words[_EPOCH // 4] = self._target
                break
            if self._is_broken():
                return BROKEN
            if time.monotonic() >= deadline or (polls > self._yields and self._someone_left()):
                return WAITING
            polls += 1
            time.sleep(0 if polls < self._yields else 50e-6)
        if self._is_broken():  # this rank came late: those it meets have given up and gone
            return BROKEN
        self._met = self._target
        if self._comparing:
            mine = self._header(self._rank)
            if any(self._header(r) != mine for r in range(self._size)):
                return DISAGREE
        return MET

    def give_up(self) -> None:
        """Tell every rank, waiting or late, that nobody will meet here again."""
        first = (self._target + (self._met == self._target)) % 2**32
        at, broken = self._words[_BROKEN_WORD // 4 :][:2]
        if not broken or _is_before(first, int(at)):
            self._words[_BROKEN_WORD // 4] = first
            self._words[_BROKEN_WORD // 4 + 1] = 1
        self._words[self._slot(self._rank) + 1] = _GAVE_UP

    def _is_broken(self) -> bool:
        at, broken = self._words[_BROKEN_WORD // 4 :][:2]
        return bool(broken) and not _is_before(self._target, int(at))

    def leave(self) -> None:
        """Take part no longer."""
        if self._words[self._slot(self._rank) + 1] != _GAVE_UP:
            self._words[self._slot(self._rank) + 1] = _LEFT

    def reduce_sources(self, out: int, dtype: int, reduction: int, first: int, numel: int) -> None:
        """Reduce elements ``[first, first + numel)`` of every rank's source, in rank order, into address ``out``."""
        kind = numpy_dtype(_NAMES[dtype])
        nbytes, skip = numel * kind.itemsize, first * kind.itemsize
        sources = [self._view(self._locations(r)[0:2], skip, nbytes).view(kind) for r in range(self._size)]
        reduce_into(_bytes_at(out, nbytes).view(kind), sources, reduction=_REDUCTIONS[reduction])

    def reduce_into_all(self, dtype: int, reduction: int, first: int, numel: int) -> None:
        """Reduce as `reduce_sources` does, into every rank's out, all of which lie in windows."""
        kind = numpy_dtype(_NAMES[dtype])
        result = np.empty(numel, kind)
        self.reduce_sources(result.ctypes.data, dtype, reduction, first, numel)
        for r in range(self._size):
            self._view(self._locations(r)[2:4], first * kind.itemsize, result.nbytes)[:] = result.view(np.uint8)

    def copy_from_source(self, rank: int, first: int, to: int, nbytes: int) -> None:
        """Copy ``nbytes`` of rank's source, from byte ``first`` on, to address ``to``."""
        self._copy(self._locations(rank)[0:2], first, to, nbytes)

    def copy_from_out(self, rank: int, first: int, to: int, nbytes: int) -> None:
        """Copy ``nbytes`` of rank's out, from byte ``first`` on, to address ``to``."""
        self._copy(self._locations(rank)[2:4], first, to, nbytes)

    def sources_in_windows(self) -> bool:
        """Say whether every rank's source lies in a window."""
        return all(self._locations(r)[0] != PRIVATE for r in range(self._size))

    def outs_in_windows(self) -> bool:
        """Say whether every rank's out lies in a window."""
        return all(self._locations(r)[2] != PRIVATE for r in range(self._size))

    def all_sources_in(self, window: int) -> bool:
        """Say whether every rank's source lies in ``window``."""
        return all(self._locations(r)[0] == window for r in range(self._size))

    def one_out(self) -> bool:
        """Say whether every rank's out is one and the same memory."""
        outs = {self._locations(r)[2:4] for r in range(self._size)}
        return len(outs) == 1 and next(iter(outs))[0] != PRIVATE

    def _slot(self, rank: int) -> int:
        return (_CONTROL_BYTES + rank * _SLOT_BYTES) // 4

    def _call(self, rank: int) -> int:
        return self._slot(rank) * 4 + _CALLS + self._turn * _CALL_BYTES

    def _locations(self, rank: int) -> tuple[int, int, int, int]:
        found: tuple[int, int, int, int] = struct.unpack_from("<qQqQ", self._raw, self._call(rank))
        return found

    def _header(self, rank: int) -> bytes:
        first = self._call(rank) + 32
        return self._memory[first : first + AGREED_BYTES].tobytes()

    def _view(self, location: tuple[int, ...], first: int, nbytes: int) -> Array:
        window, offset = location
        base = offset if window == PRIVATE else self._windows[window] + offset
        return _bytes_at(base + first, nbytes)

    def _copy(self, location: tuple[int, ...], first: int, to: int, nbytes: int) -> None:
        _bytes_at(to, nbytes)[:] = self._view(location, first, nbytes)

    def _arrive(self) -> None:
        self._target = (int(self._words[_EPOCH // 4]) + 1) % 2**32
        self._stamp()
        self._words[self._slot(self._rank)] = self._target

    def _stamp(self) -> None:
        self._memory[self._slot(self._rank) * 4 + 16 :][:8].view(np.uint64)[0] = time.monotonic_ns()

    def _someone_left(self) -> bool:
        slots = (self._slot(r) for r in range(self._size))
        return any(self._words[slot + 1] == _LEFT and self._words[slot] != self._target for slot in slots)


def _is_before(left: int, right: int) -> bool:
    """Say whether an epoch comes before another; they wrap around."""
    return left != right and (right - left) % 2**32 < 2**31


def _bytes_at(address: int, nbytes: int) -> Array:
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
