"""`PreparedCalls`: calls whose arguments were found good before.

A training loop makes the same calls over the same arrays again and again; checking them anew each time would cost more
than a small collective itself. An array is known again by its identity, and still has to lie where it lay. May import:
comm.call.
"""

from __future__ import annotations

import sys
import weakref
from types import CodeType
from typing import Any

from zerort.comm.call import Call, call_site, is_ours
from zerort.native import address_of
from zerort.typing import Array

__all__ = ["PreparedCalls"]

_CAPACITY = 256
"""Calls to remember; one that makes more different ones is checked anew."""


class _Prepared:
    """A call, and what must be the same for it to be made again."""

    __slots__ = ("call", "code", "dtype", "nbytes", "out", "place", "source")

    def __init__(self, call: Call, source: Array, out: Array) -> None:
        self.call = call
        self.source = weakref.ref(source)  # not the array itself: remembering a call must not keep memory
        self.out = weakref.ref(out)
        self.nbytes = (source.nbytes, out.nbytes)
        self.dtype = source.dtype  # an array's dtype and shape can be set in place
        self.code: CodeType | None = None
        self.place = -1


class PreparedCalls:
    """The calls of one group, by what they were made with."""

    def __init__(self) -> None:
        self._calls: dict[Any, _Prepared] = {}

    def find(self, key: tuple[Any, ...], source: Array, out: Array, *, depth: int) -> Call | None:
        """Return the call made before with the same arguments, ready to be made again; None if there is none.

        Args:
            key: Everything the call was made with; arrays by their `id`.
            source: The array that was given.
            out: The array that was given.
            depth: How many frames above this one the verb was called.
        """
        try:
            known = self._calls.get(key)
        except TypeError:  # counts in a list cannot be looked up
            return None
        if known is None or known.source() is not source or known.out() is not out:
            return None
        call = known.call
        if (
            call.sequence >= 0  # still under way: each call under way needs an object of its own
            or (source.nbytes, out.nbytes) != known.nbytes
            or source.dtype is not known.dtype
            or out.dtype is not known.dtype
            or source.ndim + out.ndim != 2
            or address_of(source) != call.source_address
            or address_of(out) != call.out_address
            or not out.flags.writeable
        ):
            return None
        frame = sys._getframe(depth)
        if frame.f_code is not known.code or frame.f_lasti != known.place:
            call.move_to(call_site())
            known.code = None if is_ours(frame.f_code.co_filename) else frame.f_code
            known.place = frame.f_lasti
        call.source, call.out, call.result = source, out, out
        return call

    def keep(self, key: tuple[Any, ...], call: Call, source: Array, out: Array) -> None:
        """Remember a call whose arguments were found good."""
        # Otherwise they are wrong, or views made for this call; or equal dtypes that are not one object.
        if call.source is source and call.out is out and source.dtype is out.dtype:
            try:
                self._calls[key] = _Prepared(call, source, out)
            except TypeError:
                return
            if len(self._calls) > _CAPACITY:
                del self._calls[next(iter(self._calls))]  # the oldest
