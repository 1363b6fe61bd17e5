"""What each collective is in NCCL: rows of the same table that the other transports serve (`comm.geometry`).

    geometry                equal shares       shares that differ, or only one
    put side by side        ncclAllGather      a group of ncclBroadcast, one per rank that has something
    reduced                 ncclReduceScatter  a group of ncclReduce, one per rank that gets something
    each rank its own       a group of ncclSend and ncclRecv

What is only moved goes as bytes, whatever its dtype. NCCL cannot add 16-bit integers: they are reduced in 32 bits
(decision 0040).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from zerort.comm.geometry import Geometry
from zerort.comm.guard.call import Call
from zerort.device.cuda.library import cupy, load_nccl

__all__ = ["NcclMoves"]

_WIDER = {"int16": "int32", "uint16": "uint32"}


class NcclMoves:
    """One rank's side of a NCCL communicator. Every verb only queues work, on the current stream.

    Args:
        communicator: CuPy's ``NcclCommunicator``.
        rank: This rank in it.
    """

    def __init__(self, communicator: Any, rank: int) -> None:
        nccl = load_nccl()
        self._nccl = nccl
        self._communicator = communicator
        self._rank = rank
        self._dtypes = {
            "float32": nccl.NCCL_FLOAT32,
            "float64": nccl.NCCL_FLOAT64,
            "float16": nccl.NCCL_FLOAT16,
            "bfloat16": nccl.NCCL_BFLOAT16,
            "int8": nccl.NCCL_INT8,
            "int32": nccl.NCCL_INT32,
            "int64": nccl.NCCL_INT64,
            "uint8": nccl.NCCL_UINT8,
            "uint32": nccl.NCCL_UINT32,
            "uint64": nccl.NCCL_UINT64,
        }
        self._reductions = {"sum": nccl.NCCL_SUM, "max": nccl.NCCL_MAX, "min": nccl.NCCL_MIN}

    def all_reduce(self, call: Call) -> None:
        """Reduce every rank's source into every rank's out."""
        assert call.source is not None
        assert call.out is not None
        if not call.numel:
            return
        if call.dtype in _WIDER:
            wide: Any = call.source.astype(_WIDER[call.dtype])
            self._all_reduce(wide.data.ptr, wide.data.ptr, call.numel, wide.dtype.name, call.reduction)
            call.out[...] = wide  # wraps around, as the host's sums do
        else:
            self._all_reduce(call.source_address, call.out_address, call.numel, call.dtype, call.reduction)

    def _all_reduce(self, source: int, out: int, numel: int, dtype: str, reduction: str) -> None:
        self._communicator.allReduce(
            source, out, numel, self._dtypes[dtype], self._reductions[reduction], _current_stream()
        )

    def move(self, call: Call) -> None:
        """Serve ``call.geometry``."""
        table = call.geometry
        assert table is not None
        assert call.source is not None
        assert call.out is not None
        if not table.longest:
            return
        width = call.source.itemsize
        if not table.reduces:
            serve = self._gather if table.alike else self._exchange
            serve(table, call.source_address, call.out_address, width)
        elif call.dtype in _WIDER:
            source: Any = call.source.astype(_WIDER[call.dtype])
            out = cupy.empty(call.out.size, source.dtype)
            self._scatter(table, source.data.ptr, out.data.ptr, out.itemsize, out.dtype.name, call.reduction)
            if out.size:  # only root has a result of a reduce
                call.out[...] = out
        else:
            self._scatter(table, call.source_address, call.out_address, width, call.dtype, call.reduction)

    def _gather(self, table: Geometry, source: int, out: int, width: int) -> None:
        counts = [count for _, count in table.takes]
        stream, as_bytes = _current_stream(), self._nccl.NCCL_UINT8
        if len(set(counts)) == 1:
            self._communicator.allGather(source, out, counts[0] * width, as_bytes, stream)
            return
        with self._grouped():
            for rank, count in enumerate(counts):
                place = out + table.places[rank] * width
                if count:
                    given = source if rank == self._rank else place
                    self._communicator.broadcast(given, place, count * width, as_bytes, rank, stream)

    def _scatter(self, table: Geometry, source: int, out: int, width: int, dtype: str, reduction: str) -> None:
        counts = [count for _, count in table.gives]
        stream, kind, adds = _current_stream(), self._dtypes[dtype], self._reductions[reduction]
        if len(set(counts)) == 1:
            self._communicator.reduceScatter(source, out, counts[0], kind, adds, stream)
            return
        with self._grouped():
            for rank, (first, count) in enumerate(table.gives):
                if count:
                    into = out if rank == self._rank else 0  # nobody else's is written to
                    self._communicator.reduce(source + first * width, into, count, kind, adds, rank, stream)

    def _exchange(self, table: Geometry, source: int, out: int, width: int) -> None:
        stream, as_bytes = _current_stream(), self._nccl.NCCL_UINT8
        with self._grouped():
            for rank, (first, count) in enumerate(table.gives):
                if count and rank != self._rank:
                    self._communicator.send(source + first * width, count * width, as_bytes, rank, stream)
            for rank, (_, count) in enumerate(table.takes):
                if count and rank != self._rank:
                    place = out + table.places[rank] * width
                    self._communicator.recv(place, count * width, as_bytes, rank, stream)
        first, count = table.takes[self._rank]
        if count:
            runtime = cupy.cuda.runtime
            place, mine = out + table.places[self._rank] * width, source + first * width
            runtime.memcpyAsync(place, mine, count * width, runtime.memcpyDeviceToDevice, stream)

    @contextlib.contextmanager
    def _grouped(self) -> Iterator[None]:
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()


def _current_stream() -> int:
    stream: int = cupy.cuda.get_current_stream().ptr
    return stream
