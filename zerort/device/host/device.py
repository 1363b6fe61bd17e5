"""The host as a device: aligned NumPy memory, and the streams that work on it."""

# not-gpu: the host's own device
from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zerort.device.host.memory import available_nbytes
from zerort.device.host.reserve import Reserve
from zerort.device.host.stream import HostStream
from zerort.device.ticket import Ticket
from zerort.errors import CallError, ClosedError
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array, DtypeLike, Stream

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CACHE_LINE", "HostDevice"]

T = TypeVar("T")

CACHE_LINE = 64
"""Bytes. Arrays start on a cache line, so that no two ranks or threads write to one by accident."""


class HostDevice:
    """Host memory through NumPy. Owns the streams it hands out and closes them when it closes."""

    arrays = "a NumPy array"
    in_host_memory = True

    def __init__(self, name: str = "host") -> None:
        self.name = name
        self._streams: list[HostStream] = []
        self._closed = False

    def empty(self, numel: int, dtype: DtypeLike, *, alignment: int = CACHE_LINE) -> Array:
        """Return a 1-D array of ``numel`` elements whose first byte stands at a multiple of ``alignment`` bytes.

        >>> HostDevice().empty(10, "bfloat16", alignment=4096).ctypes.data % 4096
        0
        """
        self._check_open()
        if numel < 0:
            raise CallError(f"Expected numel ≥ 0, got {numel}.")
        if alignment < 1 or alignment & (alignment - 1):
            raise CallError(f"Expected an alignment that is a power of two, got {alignment}.")
        return _aligned(np.empty, numel, dtype, alignment)

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the host's memory."""
        return available_nbytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def owns(self, array: Any) -> bool:
        """Say whether ``array`` is NumPy's."""
        return isinstance(array, np.ndarray)

    scratch = empty

    def zeros(self, numel: int, dtype: DtypeLike) -> Array:
        """Return a 1-D array of zeros that begins at a cache line; its pages come when they are first touched."""
        self._check_open()
        return _aligned(np.zeros, numel, dtype, CACHE_LINE)

    def reserve(self, numel: int, dtype: DtypeLike) -> Reserve | None:
        """Return addresses for an array of which ranges come into use one after the other; None: not worth it."""
        self._check_open()
        return Reserve.open(numel, dtype)

    def flat(self, array: Array) -> Array:
        """Return an array as 1-D and contiguous."""
        return np.ascontiguousarray(array).reshape(-1)

    def put(self, source: Array, *, out: Array) -> None:
        """Copy ``source`` into ``out``, here and now."""
        np.copyto(out, source)

    def fetch(self, array: Array) -> Array:
        """Return the array."""
        return array

    def order_after(self, ticket: Ticket[T]) -> T:
        """Wait for a Ticket."""
        return ticket.wait()

    def synchronize(self) -> None:
        """Return: what a host does has happened."""

    def copy(self, source: Array, *, out: Array, stream: Stream | None = None) -> Ticket[Array]:
        """Copy ``source`` into ``out`` on ``stream`` (a stream of the device's own if None) and return the Ticket."""
        self._check_open()
        if source.shape != out.shape or source.dtype != out.dtype:
            raise CallError(
                f"Expected out like source ({source.dtype}{list(source.shape)}), got {out.dtype}{list(out.shape)}. "
                "Copy moves bytes; use zerort.native.cast_into to change the dtype."
            )

        def work() -> Array:
            np.copyto(out, source)
            return out

        on = self.named_stream("copy") if stream is None else stream
        ticket: Ticket[Array] = on.submit(work, name="copy", keep=(source, out))
        return ticket

    def stream(self, name: str) -> HostStream:
        """Return a new stream. It closes with the device."""
        self._check_open()
        stream = HostStream(name)
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        """Close every stream of this device. Closing twice is fine."""
        self._closed = True
        while self._streams:
            self._streams.pop().close()

    def named_stream(self, name: str) -> HostStream:
        """Return the device's own stream of that name, made when it is first asked for."""
        return next((stream for stream in self._streams if stream.name == name), None) or self.stream(name)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"Device {self.name!r} is closed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"HostDevice({self.name!r}, {'closed' if self._closed else f'{len(self._streams)} streams'})"


def _aligned(make: Callable[..., Array], numel: int, dtype: DtypeLike, alignment: int) -> Array:
    """Return what ``make`` makes of bytes as a 1-D array whose first byte stands at a multiple of ``alignment``."""
    kind = numpy_dtype(dtype)
    nbytes = numel * kind.itemsize
    raw = make(nbytes + alignment, np.uint8)
    first = -raw.ctypes.data % alignment
    return raw[first : first + nbytes].view(kind)
