"""`Call`: what a rank says it is doing, in a form that ranks can compare and people can read.

Every collective carries its sequence number, operation, dtype, count, name and call site. They are packed into a header
of `HEADER_BYTES`; its first `AGREED_BYTES` must be equal on all ranks before anything moves.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from zerort.comm.arrays import DeviceArrays, address_of_any
from zerort.comm.geometry import Geometry
from zerort.comm.guard.stance import Stance
from zerort.native.rendezvous import AGREED_BYTES, HEADER_BYTES
from zerort.typing import Array

__all__ = [
    "INVALID",
    "SEQUENCE_NBYTES",
    "Call",
    "call_site",
    "calls_back",
    "describe_header",
    "is_binding",
    "is_ours",
    "pack_sequence",
    "users_frame",
]

INVALID = "invalid call"
"""The operation of a rank whose arguments are wrong: it still arrives, so that the others need not wait for it."""

# sequence | op, dtype, reduction, root, numel, layout, name || site
_SEQUENCE = struct.Struct("<Q")
_AGREED = struct.Struct("<16s12s4siQQ36s")
SEQUENCE_NBYTES = _SEQUENCE.size
_SITE_BYTES = HEADER_BYTES - AGREED_BYTES
assert _SEQUENCE.size + _AGREED.size == AGREED_BYTES

_ROOM = str(Path(__file__).absolute().parents[2]) + os.sep  # zerort/
_FOR_USERS = (_ROOM + "testing", _ROOM + "cli")
_TORCH = f"-packages{os.sep}torch{os.sep}"


@dataclass(slots=True)
class Call:
    """One rank's call of one collective."""

    op: str
    site: str
    sequence: int = -1
    name: str = ""
    source: Array | None = None
    """1-D. What this rank gives."""
    out: Array | None = None
    """1-D. Where this rank's result goes."""
    source_address: int = 0
    out_address: int = 0
    counts: Any = None
    """Elements per rank, or the matrix of an all_to_all, when they were given."""
    geometry: Geometry | None = None
    dtype: str = ""
    device: DeviceArrays | None = field(default=None, repr=False)
    """The arrays that the transport carries besides NumPy's."""
    where: str = ""
    """The mark of `device` if these are its arrays."""
    numel: int = 0
    root: int = -1
    reduction: str = ""
    complaint: str = ""
    """Why this rank's arguments cannot be used; then nothing of the above but the site counts."""
    result: Any = field(default=None, repr=False)
    """What the verb returns: ``out`` in the shape that the caller gave."""
    nbytes: int = 0
    """Of the largest array that takes part on this rank."""
    places: Any = field(default=None, repr=False)
    """Where a transport found the arrays; its own business."""
    plan: Any = field(default=None, repr=False)
    """How a transport moved the arrays; its own business."""
    ahead: Any = field(default=None, repr=False)
    """What a transport sends before all have agreed on this call; its own business."""
    shortcut: Any = field(default=None, repr=False)
    """A transport's own faster way to make this call again."""
    make: Any = field(default=None, repr=False)
    """Returns a new array for the result of the same call; None if the caller gave an out."""
    delivers: bool = True
    """Whether this rank gets a result: of a reduce, only root does."""
    tally: Callable[[], dict[str, int]] | None = field(default=None, repr=False)
    """Says how many calls this rank has made in groups that were split from this one: told where ranks differ."""
    stance: Stance | None = None
    """What becomes of it if other ranks come with another call; None: all are told of a mismatch."""
    _tail: bytes = field(default=b"", repr=False)

    def header(self) -> bytes:
        """Pack what the others compare and, in a report, read."""
        return _SEQUENCE.pack(self.sequence) + self.tail()

    def tail(self) -> bytes:
        """Pack the header without the sequence number, which is all that differs when a call is made again."""
        if not self._tail:
            self._tail = _pack(
                self.op,
                self.where + self.dtype,
                self.reduction,
                self.root,
                self.numel,
                self.counts,
                self.name,
                self.site,
            )
        return self._tail

    def take(self, source: Array | None, out: Array | None) -> Call:
        """Take arrays that lie where this call's did, to make it again."""
        self.source, self.out, self.result = source, out, out
        return self

    def take_new(self, source: Array, out: Array) -> Call:
        """Take a source wherever it lies, and a new array for the result, to make this call again."""
        self.source, self.out, self.result = source.reshape(-1), out.reshape(-1), out if self.delivers else None
        self.source_address, self.out_address = address_of_any(source), address_of_any(out)
        self.places = None
        return self

    def finish(self) -> Any:
        """Let go of the arrays and return the result; the call can then be made again."""
        result = self.result
        self.source = self.out = self.result = None
        self.sequence = -1
        return result

    def describe(self) -> str:
        """Say what is called, as a person would write it."""
        text = _describe(self.op, self.where + self.dtype, self.reduction, self.root, self.numel, self.name)
        return text if self.counts is None else f"{text} counts={self.counts}"

    def locate(self) -> str:
        """Say what is called, its number and the line; before the first call of a group there is no number."""
        number = f"#{self.sequence} " if self.sequence >= 0 else ""
        return f"{number}{self.describe()} at {self.site}"


@functools.lru_cache(maxsize=8192)
def _pack(op: str, dtype: str, reduction: str, root: int, numel: int, counts: Any, name: str, site: str) -> bytes:
    # Counts, and names too long for their field, are compared by checksum.
    layout = zlib.crc32(repr((counts, name)).encode())
    agreed = _AGREED.pack(op.encode(), dtype.encode(), reduction.encode(), root, numel, layout, name.encode()[:36])
    return agreed + site.encode()[-_SITE_BYTES:].ljust(_SITE_BYTES, b"\0")


def pack_sequence(sequence: int) -> bytes:
    """Return what a header begins with."""
    return _SEQUENCE.pack(sequence)


def describe_header(header: bytes) -> tuple[int, str, str]:
    """Return (sequence, description, site) of a packed header."""
    (sequence,) = _SEQUENCE.unpack_from(header)
    op, dtype, reduction, root, numel, _, name = _AGREED.unpack_from(header, _SEQUENCE.size)
    op, dtype, reduction, name = (_text(part) for part in (op, dtype, reduction, name))
    return sequence, _describe(op, dtype, reduction, root, numel, name), _text(header[AGREED_BYTES:])


def _describe(op: str, dtype: str, reduction: str, root: int, numel: int, name: str) -> str:
    inside = []
    if dtype:
        inside.append(f"{dtype}[{numel}]")
    if reduction:
        inside.append(reduction)
    if root >= 0:
        inside.append(f"root={root}")
    return f"{op}({', '.join(inside)})" + (f" {name!r}" if name else "")


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def call_site() -> str:
    """Return ``file:line`` of the nearest caller that is neither zerort nor what calls it back: bindings, torch."""
    nearest = users_frame(1)
    frame: FrameType | None = nearest
    while frame is not None and calls_back(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or nearest
    return _site(frame.f_code.co_filename, frame.f_lineno)


def users_frame(depth: int) -> FrameType:
    """Return the nearest frame, from the one ``depth`` above the caller's on, that is not of zerort itself."""
    frame = sys._getframe(depth + 1)
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


@functools.lru_cache(maxsize=4096)
def is_ours(filename: str) -> bool:
    """Say whether a file is part of zerort, other than what users see as theirs: tests and commands."""
    return filename.startswith(_ROOM) and not filename.startswith(_FOR_USERS)


@functools.lru_cache(maxsize=4096)
def calls_back(filename: str) -> bool:
    """Say whether a file stands between users and zerort: its lines tell nobody where a mistake is."""
    between = os.path.basename(filename) == "contextlib.py" or _TORCH in filename
    return is_ours(filename) or between or is_binding(filename)


@functools.lru_cache(maxsize=4096)
def is_binding(filename: str) -> bool:
    """Say whether a file is a binding's: in a package ``zerort_…``, or below it. A plain folder may be called that."""
    folder = os.path.dirname(filename)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        if os.path.basename(folder).startswith("zerort_"):
            return True
        folder = os.path.dirname(folder)
    return False


@functools.lru_cache(maxsize=4096)
def _site(filename: str, line: int) -> str:
    here = os.getcwd() + os.sep
    return f"{filename[len(here) :] if filename.startswith(here) else filename}:{line}"
