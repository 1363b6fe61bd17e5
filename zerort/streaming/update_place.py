"""Where an update is faster: on the host, or streamed through the GPU; from what it moves and from measured speeds.

    on the device    what rests on the host is copied in, and out again if it changes; the GPU's memory does the rest
    on the host      what rests on the device is copied out, and in again if it changes; the host's memory does the rest

Copies both ways and computing run beside each other (`Staging`), so the slowest of the three is what it takes. Updates
wait for memory, not for arithmetic: bytes per second say it all (decision 0049).
"""

# not-gpu: it measures, and keeps nothing
from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zerort import native
from zerort.device import HostDevice
from zerort.errors import CallError
from zerort.streaming.transfers import ArrayTransfer, Place
from zerort.typing import Array, Device

__all__ = ["Estimate", "Speeds", "Traffic", "choose_place", "measure"]

_REPEATS = 3
_NUMEL = 1024**2
_COPIED = 8 * 1024**2
"""Bytes: enough to be copied at full speed, and so few that it takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that an update reads and writes, by where they rest."""

    host_read: float
    host_written: float
    device_read: float
    device_written: float

    @classmethod
    def of(cls, chunks: Sequence[Sequence[ArrayTransfer]]) -> Traffic:
        """Add up what a staging would be given.

        >>> Traffic.of([[ArrayTransfer(np.zeros(10)), ArrayTransfer(np.zeros(5), write=False)]])
        Traffic(host_read=120, host_written=80, device_read=0, device_written=0)
        """
        transfers = list(itertools.chain.from_iterable(chunks))
        here = [one for one in transfers if one.moves_to("device")]
        there = [one for one in transfers if one.moves_to("host")]
        return cls(
            host_read=sum(one.array.nbytes for one in here if one.read),
            host_written=sum(one.array.nbytes for one in here if one.write),
            device_read=sum(one.array.nbytes for one in there if one.read),
            device_written=sum(one.array.nbytes for one in there if one.write),
        )

    @property
    def total(self) -> float:
        """What the optimizer's kernel moves, wherever it runs."""
        return self.host_read + self.host_written + self.device_read + self.device_written


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What a machine can do, in bytes per second."""

    copy_in: float
    """Host to device."""
    copy_out: float
    """Device to host."""
    host: float
    """An optimizer's kernel on the host, reads and writes together."""
    device: float
    """One on the device."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was expected of either place, in seconds, and which is better."""

    place: Place
    host: float
    device: float


def choose_place(traffic: Traffic, speeds: Speeds) -> Estimate:
    """Return where an update takes less time; where both take the same, the device, which leaves the host alone.

    A GPU on a bus of 25 GB/s beside a host that does AdamW at 20 GB/s. Moments and master weights of 1000 parameters on
    the host, 12 bytes each, and of the gradient and the parameter 4 bytes on the GPU: the host has 32 bytes to move.

    >>> speeds = Speeds(copy_in=25e9, copy_out=25e9, host=20e9, device=1500e9)
    >>> state = Traffic(host_read=12e3, host_written=12e3, device_read=4e3, device_written=4e3)
    >>> choose_place(state, speeds)
    Estimate(place='device', host=1.6e-06, device=4.8e-07)

    A bus that is shared by eight GPUs turns it round:

    >>> choose_place(state, Speeds(copy_in=3e9, copy_out=3e9, host=20e9, device=1500e9))
    Estimate(place='host', host=1.6e-06, device=4e-06)
    """
    device = max(
        traffic.host_read / speeds.copy_in, traffic.host_written / speeds.copy_out, traffic.total / speeds.device
    )
    host = max(
        traffic.device_read / speeds.copy_out, traffic.device_written / speeds.copy_in, traffic.total / speeds.host
    )
    return Estimate("device" if device <= host else "host", host, device)


_measured: dict[str, Speeds] = {}


def measure(device: Device, *, pinned: Array | None = None) -> Speeds:
    """Measure a device and its host, once in a process: some tens of milliseconds.

    Ranks of one node that measure at the same time share its memory and its bus, as they will in a step.

    Args:
        device: Whose copies and memory.
        pinned: Host memory to copy from and to, 1-D and uint8, of which up to 8 MiB are overwritten. None takes
            pageable memory.
    """
    if device.name not in _measured:
        if pinned is None:
            pinned = HostDevice().empty(_COPIED, "uint8", alignment=4096)
        if pinned.dtype != np.uint8 or pinned.size < 1:
            raise CallError(f"Expected memory to copy from as 1-D uint8, got {pinned.dtype}{list(pinned.shape)}.")
        here = pinned[:_COPIED]
        there, other = device.empty(here.size, "uint8"), device.empty(here.size, "uint8")
        _measured[device.name] = Speeds(
            copy_in=here.size / _seconds(lambda: device.copy(here, out=there).wait()),
            copy_out=here.size / _seconds(lambda: device.copy(there, out=here).wait()),
            host=_adamw_on_host(),
            device=2 * here.size / _seconds(lambda: device.copy(there, out=other).wait()),
        )
    return _measured[device.name]


@functools.cache
def _adamw_on_host() -> float:
    """Return the bytes per second that AdamW moves on this host, on the thread that calls."""
    param, grad, first, second = (np.ones(_NUMEL, np.float32) for _ in range(4))

    def step() -> None:
        native.adamw_(param, grad, first, second, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1)

    return 7 * param.nbytes / _seconds(step)  # the gradient is only read


def _seconds(work: Callable[[], object]) -> float:
    """Return the least time of a few; the first also touches memory."""
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
