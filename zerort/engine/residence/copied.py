"""`CopiedParameters`: each rank's range, and the whole once on every host, where it stays until ranges change.

    changed ──> the next `start` brings ranges to the copy: as they are, as codes, or by what has changed
    not         the copy is the whole: a gather meets nobody, and moves nothing

Ranks of a host that share memory share the copy; others, and GPUs, have one each. It is what deltas are taken from and
applied to (decision 0140), and what backward finds of forward's gathers (`Plan.secondary`, decision 0141). Where codes
are of differences it is part of the state of a run, and in checkpoints (decision 0196).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from zerort.buffer import tell_sizes
from zerort.comm import Group
from zerort.device import Done, Ticket
from zerort.engine.residence.parameters import Parameters
from zerort.engine.residence.sharded import ShardedParameters
from zerort.errors import ZerortError
from zerort.typing import Array

__all__ = ["CopiedParameters", "announce_changes"]


class CopiedParameters(ShardedParameters):
    """Each rank's range in memory, and a copy of the whole. The other arguments are those of `Parameters`.

    Args:
        copy: The whole, one for all ranks of a host that share memory; zeros at first, or what other ranges were.
        is_current: Whether it holds what ranges are: those of another cut were brought there.
    """

    needs_room = False
    is_resident = False

    def __init__(self, *args: Any, copy: Array, is_current: bool = False, **kwargs: Any) -> None:
        self._copy = copy
        super().__init__(*args, **kwargs)
        self._place = copy
        if is_current:
            self.take_current()
        self._told: Sequence[int] | None = None

    @property
    def host_copy(self) -> Array:
        """The copy of the whole, which ranks of a host may share."""
        return self._copy

    @property
    def base(self) -> Array | None:
        """The copy, if differences are added to it."""
        return self._copy if self._gathers.adds else None

    @property
    def is_copy_current(self) -> bool:
        """Whether ranges were brought there since they have changed."""
        return self._whole is not None and not self._has_failed(self._whole)

    def take_current(self) -> None:
        """Say that the copy is what ranges have to bring there: the next `start` meets nobody. Every rank says so."""
        self._whole = Done(self._copy)

    def start(self, out: Array | None = None) -> Ticket[Any]:
        """Bring ranges to the copy, if they have changed since they were there, or if the last try has failed."""
        if self._whole is None or self._has_failed(self._whole):
            self._whole = self._gather(self.array.memory, out=self._copy, told=self._told)
        return self._whole

    @staticmethod
    def _has_failed(gather: Ticket[Array]) -> bool:
        """Say whether a gather has ended with an error: then it did so on all ranks, and the copy is as it was."""
        if gather.done():
            try:
                gather.wait()  # not-gpu: it is done, and asked for its error
            except ZerortError:
                return True
        return False

    def finish(self) -> Ticket[Array]:
        """Return the Ticket of the whole."""
        assert self._whole is not None, "finished before it was started"
        return self._whole

    def release(self) -> None:
        """Keep the copy."""

    def assign(self, values: Mapping[str, Array]) -> None:
        """Write tensors, as far as they are in this rank's range; the copy follows at the next gather."""
        super().assign(values)
        self.changed()

    def changed(self) -> None:
        """Say that ranks have written to their ranges: the next `start` brings them to the copy."""
        self._whole = self._told = None

    def measure(self) -> int | None:
        """Return how many bytes this rank is going to send, if the others have to be told."""
        return self._gathers.measure(self.array.memory, self._copy[self._own.slice])

    def expect(self, told: Sequence[int]) -> None:
        """Note what every rank is going to send."""
        self._told = told

    def close_range(self) -> None:
        """Give this rank's range back: the copy belongs to another cut as well."""
        self._group.release_local(self.array.memory)

    def close(self) -> None:
        """Give the memory back."""
        self.close_range()
        self._group.release_local(self._copy)


def announce_changes(group: Group, parameters: Sequence[Parameters], *, traffic: Counter[str] | None) -> None:
    """Tell all ranks, at once, what this one is going to send of what has changed. Every rank calls this.

    Nothing is said of those whose bytes are known without it; if there are no others, nobody meets.
    """
    sizes = [(one, one.measure()) for one in parameters]
    asked = [(one, size) for one, size in sizes if size is not None]
    if asked:
        told = tell_sizes(group, [size for _, size in asked], name="changes", traffic=traffic)
        for (one, _), every in zip(asked, told, strict=True):
            one.expect(every)
