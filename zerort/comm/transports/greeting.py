"""`Greeter`: before a call, ranks of different hosts compare 16 bytes of it; a small call's data travels along.

    direct      digest of the call · its number, places, flags │ data                 one message to each other
    passed on   digest of the call · its number, places, flags │ data heard so far    to 1, 2, 4, … ahead, in turn

One rank greets for each host, or for itself where ranks share no memory; messages/network.py says which way. Headers,
which tell where each rank calls from, travel only if some rank calls from a place that the others have not heard of:
that is one of the flags; else a greeting has the number of what they have heard (places.py). The compiled form
(``native/src/hosts.h``) sends the same messages.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerort.comm.guard.call import SEQUENCE_NBYTES, Call
from zerort.comm.transports.messages.network import Network
from zerort.comm.transports.places import NUMBER_BITS
from zerort.native.rendezvous import AGREED_BYTES
from zerort.native.wire import plan_greeting
from zerort.typing import Array

__all__ = [
    "DIFFERS",
    "GREETING_NBYTES",
    "NEW_PLACE",
    "Greeter",
    "digest_of",
    "direct_nbytes",
    "place_of",
    "small_nbytes",
    "with_place",
]

DIFFERS, NEW_PLACE = 1, 2
"""Flags: calls differ, or one cannot be made; some rank calls from a place that the others have not heard of."""

_SMALL_NBYTES = 64 * 1024
"""Of the largest array whose data travels with the greeting, where that is passed on."""

_DIRECT_NBYTES, _LEAST_DIRECT_NBYTES, _DIRECT_SECONDS = 2 * 1024**2, 512 * 1024, 9e-3
"""The same where each host greets all others, on a fast wire and on a slow one; and of the wire's time, between these.

Beyond, it pays to sum and copy while other pieces are on the wire."""

_EARLY_SECONDS = _DIRECT_SECONDS / 2
"""The same of gathers whose first rounds are on the wire before all have agreed on the call."""

_READ_NBYTES = 4 * 1024**2
"""What one rank of a host may read of arrays for all others there: of longer ones each should read a part."""

_MOST_NBYTES = 1024**2
"""Of the data of all hosts together."""

_FORM = struct.Struct("<16sQ")
GREETING_NBYTES = _FORM.size
_FLAG_BITS = 2
_FLAGS: int = 2**_FLAG_BITS - 1
_SEQUENCE_SHIFT = _FLAG_BITS + NUMBER_BITS


def with_place(flags: int, number: int) -> int:
    """Return flags together with the number of the set of places that a call is made from (places.py)."""
    return flags | number << _FLAG_BITS


def place_of(flags: int) -> int:
    """Return the number that `with_place` was given."""
    return flags >> _FLAG_BITS


@functools.lru_cache(maxsize=4096)
def digest_of(tail: bytes) -> bytes:
    """Return 16 bytes that tell a call from others, without its number.

    Args:
        tail: What `Call.tail` packs; of it counts what must be equal on all ranks.
    """
    return hashlib.blake2b(tail[: AGREED_BYTES - SEQUENCE_NBYTES], digest_size=16).digest()


Trade = Callable[[Sequence[tuple[int, Array]], Sequence[tuple[int, Array]]], None]


def small_nbytes(hosts: int, *, slab_nbytes: int, message_nbytes: int) -> int:
    """Return the bytes of data that each host may send with a greeting; whole elements of any kind.

    Args:
        hosts: How many.
        slab_nbytes: What a host's ranks can stage of an array.
        message_nbytes: The largest single message.
    """
    room = min(_SMALL_NBYTES, slab_nbytes, _MOST_NBYTES // hosts, (message_nbytes - GREETING_NBYTES) // hosts)
    return max(0, room) // 64 * 64


def direct_nbytes(
    hosts: int, network: Network, *, ranks: int, starts_early: bool, slab_nbytes: int, message_nbytes: int
) -> tuple[int, int, int]:
    """Return the bytes of the largest sum and of the largest gather that travel with direct greetings, and of these.

    A greeting has room for twice an equal share of the array: hosts may have more ranks than others, and ranks larger
    shards.

    Args:
        hosts: How many.
        network: What lies between them.
        ranks: Of the largest host.
        starts_early: Whether the first rounds of longer gathers leave before all have agreed on the call. Those without
            an out do not, but all ranks have to decide alike, and some of a call may give one.
        slab_nbytes: What a host's ranks can stage of an array.
        message_nbytes: The largest single message.
    """
    least = small_nbytes(hosts, slab_nbytes=slab_nbytes, message_nbytes=message_nbytes)
    summed, gathered = (
        min(max(network.carries(seconds), _LEAST_DIRECT_NBYTES), _DIRECT_NBYTES) // 64 * 64
        for seconds in (_DIRECT_SECONDS, _EARLY_SECONDS if starts_early else _DIRECT_SECONDS)
    )
    whole = max(least, min(summed, _READ_NBYTES // ranks, slab_nbytes) // 64 * 64)
    each = max(least, min(2 * whole // hosts, message_nbytes - GREETING_NBYTES) // 64 * 64)
    room = max(least, min(whole, each * hosts // 2))
    return room, min(room, gathered), each


class Greeter:
    """One rank that greets others.

    Args:
        ranks: Those who greet, in order; this rank is one of them.
        rank: This rank.
        room: Bytes of data that a greeting may carry for each.
        direct: Whether each sends to every other at once.
        trade: Sends (rank, bytes) and receives (rank, room for bytes), all at once.
    """

    def __init__(self, ranks: Sequence[int], rank: int, *, room: int, direct: bool, trade: Trade) -> None:
        self._ranks = ranks
        self._me = ranks.index(rank)
        self._room, self._direct, self._trade = room, direct, trade
        count = len(ranks)
        if direct:
            self._messages = np.zeros((count, GREETING_NBYTES + room), np.uint8)
        else:
            self._messages = np.zeros((2, GREETING_NBYTES + count * room), np.uint8)
        others = [rank for place, rank in enumerate(ranks) if place != self._me]
        self._receives = list(zip(others, self._messages[1:], strict=True)) if direct else []
        # A message for each, with data of its own.
        self._parts = np.zeros(self._messages.shape if direct else (0, 0), np.uint8)

    def plan(self, post: Any, call: Call, nbytes: int, most: int, *, places: int) -> Any:
        """Return what the compiled form needs to send what `greet` sends."""
        return plan_greeting(
            post,
            ranks=list(self._ranks),
            me=self._me,
            direct=self._direct,
            messages=self._messages,
            parts=self._parts,
            nbytes=nbytes,
            most=most,
            digest=digest_of(call.tail()),
            places=places,
        )

    def data(self, nbytes: int) -> Array:
        """Return where this rank puts the data that its next greeting carries."""
        assert nbytes <= self._room
        return self._messages[0, GREETING_NBYTES:][:nbytes]

    def part(self, place: int, nbytes: int) -> Array:
        """Return where this rank puts the data that its next greeting carries to one of those who greet, or keeps."""
        assert nbytes <= self._room
        return self._parts[place, GREETING_NBYTES:][:nbytes]

    def greet(
        self, call: Call, flags: int, nbytes: int = 0, most: int = 0, *, parts: Sequence[int] = ()
    ) -> tuple[int, list[Array]]:
        """Return the flags of all, with `DIFFERS` if their calls do, and the data of each; that only if they do not.

        Args:
            call: What this rank is about to do.
            flags: What it has to say, `with_place`; so is what is returned.
            nbytes: Of the data that it sends.
            most: Of the data of any rank; the same on all if their calls are.
            parts: Instead of both, where each sends directly: of the data that it has for each (see `part`). What is
                returned is what each had for this rank.
        """
        digest, number = digest_of(call.tail()), _number_of(call.sequence, flags)
        if not self._direct:
            return self._pass_on(digest, number, flags, max(most, nbytes))
        head = np.frombuffer(_FORM.pack(digest, number | flags), np.uint8)
        if parts:
            self._parts[:, :GREETING_NBYTES] = head
            rows = [row[: GREETING_NBYTES + part] for row, part in zip(self._parts, parts, strict=True)]
            mine = rows.pop(self._me)
        else:
            mine = self._messages[0, : GREETING_NBYTES + nbytes]
            mine[:GREETING_NBYTES] = head
            rows = [mine] * len(self._receives)
        self._trade([(rank, row) for (rank, _), row in zip(self._receives, rows, strict=True)], self._receives)
        for _, row in self._receives:
            flags |= _hear(row, digest, number)
        told = [row[GREETING_NBYTES:] for _, row in self._receives]
        told.insert(self._me, mine[GREETING_NBYTES:])
        return flags, told

    def _pass_on(self, digest: bytes, number: int, flags: int, width: int) -> tuple[int, list[Array]]:
        """Hear of all in as many rounds as their number has bits: what was heard is passed on.

        Place k of the message holds the data of the rank k places behind this one.
        """
        mine, theirs = self._messages[0], self._messages[1]
        count, heard = len(self._ranks), 1
        while heard < count:
            many = min(heard, count - heard)
            mine[:GREETING_NBYTES] = np.frombuffer(_FORM.pack(digest, number | flags), np.uint8)
            to, source = self._ranks[(self._me + heard) % count], self._ranks[(self._me - heard) % count]
            self._trade([(to, mine[: GREETING_NBYTES + many * width])], [(source, theirs)])
            flags |= _hear(theirs, digest, number)
            came = theirs[GREETING_NBYTES:][: many * width]
            mine[GREETING_NBYTES + heard * width :][: came.size] = came
            heard += many
        places = [GREETING_NBYTES + (self._me - place) % count * width for place in range(count)]
        return flags, [mine[first : first + width] for first in places]


def _number_of(sequence: int, flags: int) -> int:
    number: int = sequence << _SEQUENCE_SHIFT & 2**64 - 1  # what does not fit is left out, as by the compiled form
    return number | flags & ~_FLAGS


def _hear(message: Array, digest: bytes, number: int) -> int:
    """Return the flags of a message, with `DIFFERS` if it is about another call, `NEW_PLACE` if made from elsewhere."""
    theirs, said = _FORM.unpack_from(message)  # type: ignore[arg-type]
    same: bool = theirs == digest and said >> _SEQUENCE_SHIFT == number >> _SEQUENCE_SHIFT
    is_known: bool = said & ~_FLAGS == number
    return int(said & _FLAGS) | (0 if same else DIFFERS) | (0 if is_known else NEW_PLACE)
