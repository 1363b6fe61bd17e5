"""`Network`: what messages between hosts cost, measured when a group opens, and which way of greeting follows from it.

    direct      one message to each other host, all at once          latency + (hosts - 2) · overhead
    passed on   to the hosts 1, 2, 4, … ahead, in turn               log2(hosts) · latency

Both carry the data of a small call along, (hosts - 1) · S in all: what is summed comes whole from every host, so that
all add in the order of hosts. Scattered and gathered in rounds, a sum moves 2 (hosts - 1) / hosts · S, but in two more
exchanges; so there is a size up to which sums travel with the greeting. Where hosts greet each other directly, sums can
also be cut by host, which moves as little as rounds do (small_calls.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zerort.typing import Array

__all__ = ["Network", "is_direct", "largest_sum", "largest_whole", "measure"]

Trade = Callable[[Sequence[tuple[int, Array]], Sequence[tuple[int, Array]]], None]

_TRIES, _LONG_TRIES = 12, 4
"""How often each figure is taken. Short messages take little time, and others' work much of theirs."""

_LATENCIES_OF_A_ROUND = 4
"""What an exchange in rounds costs without its bytes: meetings of the host's ranks before and after it, and Python."""

_WHOLE_NBYTES, _WHOLE_SCATTERED_NBYTES = 16 * 1024, 2048
"""Of the largest sum that travels whole where it need not: others' work may have made a latency look long.

One of which each rank needs a part takes one exchange either way: whole it spares copies of its parts, no more."""

_FEW_HOSTS = 8
"""Which always greet each other directly.

A latency or two are at stake, and what a group measures while it opens may be wrong by more; passed on, arrays of up to
2 MiB would take twice as long."""

_SHORT_NBYTES, _LONG_NBYTES = 64, 256 * 1024
_MOST_AT_ONCE = 8
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Network:
    """Costs of messages between hosts; those of the slowest pair that was looked at."""

    latency: float
    """Seconds until a short message has come, and one from there has gone."""
    overhead: float
    """Seconds for each further message at the same time (decision 0195 says how both are taken)."""
    bandwidth: float
    """Bytes per second of a long message."""
    round_trip: float | None = None
    """Seconds until a kernel has heard that what it sent has come, however busy ranks are. Over MPI nobody knows."""

    def carries(self, seconds: float) -> int:
        """Return the bytes that a link carries in that time; as many as any array has if nobody measured it."""
        return int(min(seconds * self.bandwidth, _UNLIMITED)) if seconds else 0

    def costs(self) -> list[float]:
        """Return what the largest of which, over all ranks, is what counts."""
        return [self.latency, self.overhead, 1 / self.bandwidth]


def measure(ranks: Sequence[int], rank: int, trade: Trade) -> Network:
    """Exchange some messages with other hosts. Every one of ``ranks`` calls this.

    Args:
        ranks: One of each host.
        rank: This one.
        trade: Sends (rank, bytes) and receives (rank, room for bytes), all at once.
    """
    count, me = len(ranks), ranks.index(rank)

    def seconds(nbytes: int, *steps: int) -> float:
        """Return how long an exchange takes with the hosts that are so many steps ahead and behind."""
        sends = [(ranks[(me + step) % count], sent[:nbytes]) for step in steps]
        receives = [(ranks[(me - step) % count], room[:nbytes]) for step, room in zip(steps, rooms, strict=False)]
        began = time.perf_counter()
        trade(sends, receives)
        return time.perf_counter() - began

    several = min(count - 1, _MOST_AT_ONCE)
    sent, rooms = np.zeros(_LONG_NBYTES, np.uint8), np.zeros((several, _LONG_NBYTES), np.uint8)
    in_turn, at_once = [], []
    for _ in range(_TRIES):  # both ways in turn, so that others' work slows down both
        in_turn.append(sum(seconds(_SHORT_NBYTES, 2**k) for k in range(_rounds(count))))
        at_once.append(seconds(_SHORT_NBYTES, *range(1, several + 1)))
    latency = _usual(in_turn) / _rounds(count)
    overhead = (_usual(at_once) - latency) / (several - 1) if several > 1 else 0.0
    long = min(seconds(_LONG_NBYTES, 1) for _ in range(_LONG_TRIES))
    # A latency that was measured beside others' work may be as long as a long message: no more than half is taken off.
    return Network(latency, max(overhead, 0.0), _LONG_NBYTES / max(long - latency, long / 2))


def _usual(seconds: list[float]) -> float:
    """Return what an exchange takes when others' work does not hold it up.

    Not the shortest: whoever comes last finds what the others have sent, and takes that for a network without latency.
    """
    return sorted(seconds)[len(seconds) // 4]


def is_direct(network: Network, hosts: int) -> bool:
    """Say whether each host greets all others at once, or what was heard is passed on.

    Passed on only where that takes clearly less: directly, sums can be cut by host, which spares more than a latency.

    >>> lan = Network(latency=100e-6, overhead=20e-6, bandwidth=125e6)
    >>> is_direct(lan, 8), is_direct(lan, 64)
    (True, False)
    """
    if hosts <= _FEW_HOSTS:
        return True
    return network.latency + (hosts - 2) * network.overhead <= 1.5 * _rounds(hosts) * network.latency


def largest_sum(network: Network, hosts: int, *, scattered: bool) -> int:
    """Return the bytes of the largest array whose sum travels with the greeting rather than in rounds.

    Args:
        network: What messages cost.
        hosts: How many.
        scattered: Whether each rank needs a part of the sum only: no gather would follow in rounds.

    >>> lan = Network(latency=100e-6, overhead=20e-6, bandwidth=125e6)
    >>> largest_sum(lan, 4, scattered=False), largest_sum(lan, 4, scattered=True)
    (66666, 22222)
    """
    exchanges = 1 if scattered else 2
    spared = exchanges * _LATENCIES_OF_A_ROUND * network.latency
    surplus = (hosts - 1) * (1 - exchanges / hosts)  # times S: what rounds would not have moved
    return int(spared * network.bandwidth / surplus) if surplus else _UNLIMITED


def largest_whole(network: Network, hosts: int, *, scattered: bool) -> int:
    """Return the bytes of the largest array that hosts send whole to all others to sum it, rather than cut by host.

    Args:
        network: What messages cost.
        hosts: How many.
        scattered: Whether each rank needs a part of the sum only. Cut, a sum moves (hosts - 1) / hosts of itself then,
            else twice that, in a second exchange; whole it moves hosts - 1 times.

    >>> lan = Network(latency=100e-6, overhead=20e-6, bandwidth=125e6)
    >>> largest_whole(lan, 4, scattered=False), largest_whole(lan, 4, scattered=True)
    (8333, 2048)
    """
    exchanges = 1 if scattered else 2
    surplus = (hosts - 1) * (1 - exchanges / hosts)  # times S: what is spared
    most = _WHOLE_SCATTERED_NBYTES if scattered else _WHOLE_NBYTES
    return min(most, int(network.latency * network.bandwidth / surplus)) if surplus else _UNLIMITED


def _rounds(hosts: int) -> int:
    return max(1, (hosts - 1).bit_length())
