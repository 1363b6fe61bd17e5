"""A group of one: every collective is a copy at most, and nobody is waited for."""

from __future__ import annotations

import numpy as np

from zerort.comm.guard.call import Call
from zerort.comm.transport import Transport
from zerort.config import GroupOptions
from zerort.errors import CallError
from zerort.typing import Array

__all__ = ["SoloTransport"]


class SoloTransport(Transport):
    """One rank, alone."""

    kind = "solo"
    one_memory = True
    reads_in_place = True

    def __init__(self, *, name: str, options: GroupOptions) -> None:
        super().__init__(0, 1, name=name, options=options)

    def meet(self, call: Call) -> None:
        """Return at once, unless this rank's own arguments are wrong."""
        if call.complaint:
            raise CallError(f"{call.complaint} (at {call.site})")

    def move(self, call: Call) -> None:
        """Copy source to out: with one rank, that is what every collective comes to."""
        assert call.source is not None
        assert call.out is not None
        np.copyto(call.out, call.source)

    all_reduce = move

    def exchange_texts(self, text: str) -> list[str]:
        """Return the text: nobody else is here."""
        return [text]

    def allocate(self, nbytes: int) -> Array:
        """Return plain memory."""
        return np.zeros(nbytes, np.uint8)

    allocate_shared = allocate

    def split(self, color: int | None, *, key: int, name: str) -> SoloTransport | None:
        """Return another group of one."""
        return None if color is None else SoloTransport(name=name, options=self.options)
