"""Small calls between hosts: which are so small that data travels with the greeting, and sums that are cut by host.

    whole            the array to all hosts (greeting.py)                      one exchange     (hosts - 1) · S
    cut by host      to each host what it sums:
      reduce_scatter   the part that its ranks need                            one exchange     (hosts - 1) / hosts · S
      all_reduce       a part of equal size; then its sum to all               two exchanges  2 (hosts - 1) / hosts · S

Which way is the same on all ranks: it follows from what messages cost, which all have agreed on (messages/network.py,
decision 0169). The call is compared with the first message of each host, as always. Where hosts greet each other
directly, up to 2 MiB is small, less on a slow wire (decisions 0195, 0202, 0204).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerort import native, trace
from zerort.comm.geometry import even_part
from zerort.comm.guard.call import Call
from zerort.comm.transports.greeting import DIFFERS, Greeter, direct_nbytes, small_nbytes
from zerort.comm.transports.messages.network import Network, is_direct, largest_sum, largest_whole
from zerort.typing import Array

__all__ = ["SmallCalls", "cut_sum", "elements_of", "ranges_of"]

Greet = Callable[..., tuple[int, list[Array]]]


@dataclass(frozen=True, slots=True)
class SmallCalls:
    """Sizes, in bytes of the whole array, up to which a call goes in one way or another."""

    is_direct: bool
    """Each host greets all others at once; else what was heard is passed on."""
    starts_early: bool
    """The first rounds of longer gathers may leave before all have agreed on the call (decision 0204)."""
    room: int
    """Of the largest array that travels with a greeting."""
    gathers: int
    """Of the largest call that travels so and sums nothing."""
    each: int
    """What a host may send another with it."""
    sums: int
    """Of the largest all_reduce that does."""
    scatters: int
    """Of the largest call that does in which each rank needs a part of the sum only."""
    whole_sums: int
    """Of the largest all_reduce that is not cut by host."""
    whole_scatters: int
    """Of the largest of the others that is not."""

    members: Sequence[Sequence[int]]
    """The ranks of each host."""

    @staticmethod
    def of(
        network: Network,
        members: Sequence[Sequence[int]],
        *,
        slab_nbytes: int,
        message_nbytes: int,
        may_start_early: bool,
    ) -> SmallCalls:
        """Return what is fastest on a network.

        Args:
            network: What messages cost.
            members: The ranks of each host.
            slab_nbytes: What a host's ranks can stage of an array.
            message_nbytes: The largest single message.
            may_start_early: Whether what leaves before all have agreed on a call can be thrown away.
        """
        hosts, ranks = len(members), max(map(len, members))
        direct = is_direct(network, hosts)
        # Greetings that are passed on would wait behind data that nobody has asked for yet, and hosts for each other.
        starts_early = direct and may_start_early
        sizes = {"slab_nbytes": slab_nbytes, "message_nbytes": message_nbytes}
        if direct:  # cut by host, what moves is what moves in rounds, but in fewer exchanges
            room, gathers, each = direct_nbytes(hosts, network, ranks=ranks, starts_early=starts_early, **sizes)
            sums = scatters = room
            whole = tuple(min(each, largest_whole(network, hosts, scattered=one)) for one in (False, True))
        else:
            room = gathers = each = small_nbytes(hosts, **sizes)
            sums, scatters = (min(room, largest_sum(network, hosts, scattered=one)) for one in (False, True))
            whole = (room, room)
        return SmallCalls(direct, starts_early, room, gathers, each, sums, scatters, whole[0], whole[1], members)

    def has(self, call: Call) -> bool:
        """Say whether a call's data travels with the greeting: so for all ranks alike, or their calls differ."""
        table, source, out = call.geometry, call.source, call.out
        if source is None or out is None or (table is None and call.op != "all_reduce"):
            return False
        if table is None:
            return out.nbytes <= self.sums
        if table.reduces:
            nbytes, most, ranges = call.numel * source.itemsize, self.scatters, table.gives
        else:
            # Passed on, a broadcast takes as much room as everybody's data.
            most = self.gathers if self.is_direct or call.op != "broadcast" else self.scatters
            nbytes, ranges = out.nbytes, table.takes
        if nbytes > most or not (table.reduces or table.alike):
            return False
        width = source.itemsize
        return nbytes <= self.each or all(
            sum(ranges[rank][1] for rank in ranks) * width <= self.each for ranks in self.members
        )

    def cuts(self, call: Call) -> bool:
        """Say whether a small call is a sum that is cut by host: each sends to each what that one sums."""
        table, source = call.geometry, call.source
        assert source is not None
        if table is not None and not table.reduces:
            return False
        return call.numel * source.itemsize > (self.whole_sums if table is None else self.whole_scatters)

    def sizes(self, call: Call, host: int) -> tuple[int, int, int]:
        """Return the bytes that a host tells all others in a small call, the most that any does, and what it sends.

        Of a sum that is cut by host, what it tells all others is its part of the sum.
        """
        assert call.source is not None
        width, table, others = call.source.itemsize, call.geometry, len(self.members) - 1
        if table is not None and not table.reduces:
            shares = [sum(table.takes[rank][1] for rank in ranks) * width for ranks in self.members]
            return shares[host], max(shares), shares[host] * others
        whole = call.numel * width
        if not self.cuts(call):
            return whole, whole, whole * others
        shares = [sum(count for _, count in one) * width for one in ranges_of(call, self.members)]
        again = shares[host] * others if table is None else 0
        return shares[host], max(shares), whole - shares[host] + again


def cut_sum(
    call: Call,
    flags: int,
    whole: Array,
    *,
    members: Sequence[Sequence[int]],
    host: int,
    greeter: Greeter,
    greet: Greet,
    partial: Callable[[Array, int], None],
    is_abroad: Sequence[bool],
) -> int:
    """Sum a small array over all hosts; return the flags of all.

    Args:
        call: An all_reduce, or a call whose table reduces.
        flags: What this host has to say of it; the array is not looked at if its calls differ.
        whole: As long as the array: afterwards it holds the sum where this host's ranks need it.
        members: The ranks of each host.
        host: The number of this one.
        greeter: Whose messages carry the parts.
        greet: Its `Greeter.greet`, with an eye on alarms.
        partial: Fills an array with this host's own sum, from an element on.
        is_abroad: Of each host, whether what it is sent crosses a wire.
    """
    ranges = ranges_of(call, members)
    counts = [sum(count for _, count in of_host) for of_host in ranges]
    width, kind = whole.itemsize, whole.dtype
    parts = [greeter.part(number, count * width).view(kind) for number, count in enumerate(counts)]
    if not flags & DIFFERS:
        for part, of_host in zip(parts, ranges, strict=True):
            done = 0
            for first, count in of_host:
                partial(part[done : done + count], first)
                done += count
    flags, told = greet(call, flags, parts=[part.nbytes for part in parts])
    if flags & DIFFERS:
        return flags
    trace.count("wire.bytes", sum(part.nbytes for part, abroad in zip(parts, is_abroad, strict=True) if abroad))
    mine = np.empty(counts[host], kind) if call.geometry is not None else greeter.data(counts[host] * width).view(kind)
    if mine.size:
        native.reduce_into(mine, [row[: mine.nbytes].view(kind) for row in told], call.reduction)
    sums, where = [mine], [ranges[host]]
    if call.geometry is None:
        flags, told = greet(call, flags, mine.nbytes, max(counts) * width)
        trace.count("wire.bytes", mine.nbytes * sum(is_abroad))
        sums, where = [row[: count * width].view(kind) for row, count in zip(told, counts, strict=True)], ranges
    for total, of_host in zip(sums, where, strict=True):
        done = 0
        for first, count in of_host:
            whole[first : first + count] = total[done : done + count]
            done += count
    return flags


def ranges_of(call: Call, members: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Return, for each host, the (first, count) of the array that it sums."""
    if call.geometry is None:
        return [[even_part(call.numel, len(members), host)] for host in range(len(members))]
    return [[call.geometry.gives[rank] for rank in ranks] for ranks in members]


def elements_of(raw: Array, take: tuple[int, int], dtype: np.dtype[Any]) -> Array:
    """Return elements ``(first, count)`` of an array whose bytes came in a message."""
    first, count = take
    return raw[first * dtype.itemsize : (first + count) * dtype.itemsize].view(dtype)
