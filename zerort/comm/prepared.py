"""`PreparedCalls`: calls whose arguments were found good before.

A training loop makes the same calls over the same arrays again and again; checking them anew each time would cost more
than a small collective itself. A call is known again by its arrays' identity and the line that makes it, and its arrays
still have to lie where they lay (decision 0011). One without an out is known by its source's shape and dtype: its
result is a new array each time, or one that nobody refers to any more (decision 0108).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np

from zerort.comm.arrays import address_of_any, is_writeable
from zerort.comm.guard.call import Call
from zerort.comm.guard.checks import Given
from zerort.comm.transport import Transport
from zerort.typing import Array

__all__ = ["Prepared", "PreparedCalls", "key_of"]

_CAPACITY = 256
"""Calls to remember; one that makes more different ones is checked anew."""

_RENEWALS = 8
"""Shortcuts to make for one call without an out, before it goes without."""


class _Known:
    """An array that was found good: what must be the same for it to be good again."""

    __slots__ = ("address", "dtype", "get", "nbytes")

    def __init__(self, array: Array | None, address: int) -> None:
        # Not the array itself: remembering a call must not keep memory.
        self.get: Callable[[], Array | None] = _nothing if array is None else weakref.ref(array)
        self.address = address
        self.nbytes = 0 if array is None else array.nbytes
        self.dtype = None if array is None else array.dtype

    def still(self, array: Array | None) -> bool:
        """Say whether this is the same array, unchanged: memory, shape and dtype can be set in place."""
        if self.get() is not array or array is None:
            return array is None and self.dtype is None
        same = array.nbytes == self.nbytes and array.dtype is self.dtype and array.ndim == 1
        return same and address_of_any(array) == self.address


class Prepared:
    """A call to be made again."""

    __slots__ = ("_renewals", "call", "code", "delivers", "nbytes", "out", "shortcut", "source")

    def __init__(self, call: Call, code: CodeType, source: Array | None, out: Array | None) -> None:
        self.call = call
        self.code = code  # kept, so that no other code gets its `id`
        self.nbytes = call.nbytes
        self.delivers = call.delivers
        self.source = _Known(source, call.source_address)
        self.out = _Known(out, call.out_address)
        self.shortcut: Any = None
        """The transport's faster way; None if it has none yet, or was not asked, False if it has none."""
        self._renewals = 0

    def renew_shortcut(self) -> None:
        """Have the shortcut made anew: it has become stale. Not for ever, if sources of one shape take turns here."""
        self._renewals += 1
        self.shortcut = None if self.call.make is None or self._renewals < _RENEWALS else False


class PreparedCalls:
    """The calls of one group, by what they were made with.

    Args:
        transport: What makes them, and may know shortcuts.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.known: dict[Any, Prepared] = {}

    def take(self, key: tuple[Any, ...], source: Array | None, out: Array | None) -> Call | None:
        """Return the call made before with the same arguments, ready to be made again; None if there is none.

        Args:
            key: What `key_of` returns.
            source: The array that was given.
            out: The array that was given.
        """
        known = self.known.get(key)
        if known is None:
            return None
        call = known.call
        if call.sequence >= 0:  # still under way: each call under way needs an object of its own
            return None
        if call.make is not None:
            assert source is not None
            if not (isinstance(source, np.ndarray) and source.flags.c_contiguous and source.flags.aligned):
                return None
            call.take_new(source, call.make())
            if known.shortcut is None:
                known.shortcut = self._transport.shortcut(call)
            return call
        if not (known.source.still(source) and known.out.still(out) and (out is None or is_writeable(out))):
            return None
        call.take(source, out)
        if known.shortcut is None or (known.shortcut and call.shortcut is None):  # none yet, or it has become stale
            known.shortcut = self._transport.shortcut(call)
            call.shortcut = known.shortcut or None
        return call

    def keep(self, key: tuple[Any, ...], code: CodeType, call: Call, source: Array | None, out: Array | None) -> None:
        """Remember a call whose arguments were found good."""
        if out is None and source is not None:
            result = call.result if call.delivers else call.out
            if result is not None and not call.where:
                call.make = functools.partial(np.empty, result.shape, result.dtype)
                self._keep(key, Prepared(call, code, None, None))
            return
        # Otherwise they are wrong, or views made for this call; or equal dtypes that are not one object.
        if call.complaint or call.source is not source or call.out is not out:
            return
        if source is not None and out is not None and source.dtype is not out.dtype:
            return
        self._keep(key, Prepared(call, code, source, out))

    def _keep(self, key: tuple[Any, ...], prepared: Prepared) -> None:
        self.known[key] = prepared
        if len(self.known) > _CAPACITY:
            del self.known[next(iter(self.known))]  # the oldest


def key_of(op: str, name: str, given: Given, frame: FrameType) -> tuple[Any, ...] | None:
    """Return what a call is known by, as ``native/src/repeater.cpp`` makes it too; None if it cannot be looked up.

    Args:
        op: The verb.
        name: What its caller calls it.
        given: Its other arguments; arrays, and the code of the line, are known by their `id`.
        frame: Where it is made.
    """
    source, out, counts, root, reduction = given
    try:
        of_arrays: tuple[Any, Any] = (id(source), id(out))
        if out is None and source is not None:  # the result is an array of ours
            of_arrays = (source.shape, source.dtype)
        key = (op, *of_arrays, id(frame.f_code), frame.f_lasti, counts, root, reduction, name)
        hash(key)
    except (TypeError, AttributeError):  # no array, say, or counts that cannot be looked up: it is told later
        return None
    return key


def _nothing() -> None:
    return None
