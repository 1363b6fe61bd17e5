"""`Wire`: in which form bytes travel between ranks. A value; `engine/wire/coding.py` makes the codecs that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from zerort.errors import CallError

__all__ = ["GATHER_FORMATS", "WIRE_FORMATS", "TopK", "Wire"]

WIRE_FORMATS: Final = ("int8", "int4", "bfloat16")
"""What values can travel as."""

GATHER_FORMATS: Final = (*WIRE_FORMATS, "delta")
"""What parameters can travel as: also as what has changed of them."""

_ALSO: Final = {"bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, repr=False)
class TopK:
    """Of gradients only those of the largest magnitude travel: in each block of 1,024 elements as many.

    >>> Wire(reduce=TopK(0.01))
    Wire(gather=None, reduce=TopK(0.01), feedback=True, over='hosts')
    """

    fraction: float
    """How many of all: above 0, at most 0.5; at least one in each block. Each takes 4 bytes: its place, and its value
    as bfloat16."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.fraction, (int, float)) and not isinstance(self.fraction, bool)
        if not is_number or not 0 < self.fraction <= 0.5:
            raise CallError(
                f"Expected TopK of a number above 0 and at most 0.5, got {self.fraction!r}. TopK(0.01) is 1 %; of more "
                "than half, the places take as many bytes as they save."
            )

    def __repr__(self) -> str:
        return f"TopK({self.fraction!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How values travel: in fewer bytes. Codes have an error of at most half a step of their block, deltas have none.

    >>> Wire(gather="int8", reduce="int4")
    Wire(gather='int8', reduce='int4', feedback=False, over='hosts')
    """

    gather: Literal["int8", "int4", "bfloat16", "bf16", "delta"] | None = None
    """What gathered parameters travel as: ``"int8"`` (0.254 of float32's bytes), ``"int4"`` (0.129) or ``"bfloat16"``.
    Every rank computes with the decoded values, the owner of a shard, too; updates go to the exact shard.

    ``"delta"``, for parameters of 16 bits: after an update only the elements whose bits have changed travel, once.
    Lossless. Each host keeps the whole model between steps, which they are applied to.

    None: as they are."""

    reduce: Literal["int8", "int4", "bfloat16", "bf16"] | TopK | None = None
    """What gradients travel as, from each sender to the owner of a shard, who decodes them and sums them in float32, in
    the order of the senders: hosts, whose ranks sum theirs first; ranks with ``over="all"``; virtual shards, if there
    are any. `TopK`: only the largest travel. None: as they are."""

    feedback: bool | Literal["gather", "reduce"] | None = None
    """Whether what coding has lost is made up for: errors do not add up over steps. True: of gradients, and of
    parameters with ``gather="int4"``; ``"reduce"`` or ``"gather"``: of one of both alone.

    Of gradients, each sender keeps what they have lost, and adds it to the next ones before they are coded. Takes two
    bytes per parameter and sender (`TopK`: four), split over the ranks of a host; twice that where steps may be
    skipped.

    Of parameters with ``gather="int4"``, codes are of the difference to what every rank computes with, which is what
    codes have made of it so far. Each host keeps that whole model between steps, in the parameters' dtype, and they
    travel once per update, not once per gather. The first gather, of all of it, is as coarse as without; the error
    shrinks with each update to a part of that update. Other formats of `gather` are as without.

    None: of gradients with `TopK`, which would lose most of them, and of nothing else."""

    over: Literal["hosts", "all"] = "hosts"
    """Between which ranks: ``"hosts"``, only where ranks do not all share memory (those on GPUs: their host's), or with
    `virtual_shards`, whose bits do not depend on ranks (those of deltas never do); ``"all"``, everywhere, also between
    the GPUs of a host and on one rank."""

    def __post_init__(self) -> None:
        if self.gather is None and self.reduce is None:
            raise CallError("Expected Wire(gather=), Wire(reduce=) or both, got neither. Leave wire= out instead.")
        for field, formats in (("gather", GATHER_FORMATS), ("reduce", WIRE_FORMATS)):
            given = getattr(self, field)
            name = _ALSO.get(given, given) if isinstance(given, str) else given
            object.__setattr__(self, field, name)
            is_named = type(name) in (str, type(None)) and name in (None, *formats)
            if not is_named and not (field == "reduce" and isinstance(name, TopK)):
                others = ", or zr.TopK(0.01)" * (field == "reduce")
                raise CallError(
                    f"Expected Wire({field}=) to be one of {', '.join(map(repr, formats))}{others}, got {name!r}. "
                    "Leave it out for values that travel as they are."
                )
        if self.feedback is None:
            of_sums = "reduce" if self.gather == "int4" else True
            object.__setattr__(self, "feedback", of_sums if isinstance(self.reduce, TopK) else False)
        losses = {"reduce": self.reduce is not None, "gather": self.gather == "int4"}
        is_known = type(self.feedback) is bool or (isinstance(self.feedback, str) and self.feedback in losses)
        if not is_known or not (losses.get(str(self.feedback), True) and (not self.feedback or any(losses.values()))):
            raise CallError(
                "Expected Wire(feedback=True) with reduce= or gather='int4', whose losses it makes up for, or "
                f"feedback='reduce' or 'gather' with that one; got feedback={self.feedback!r}, reduce={self.reduce!r} "
                f"and gather={self.gather!r}."
            )
        if self.over not in ("hosts", "all"):
            raise CallError(f"Expected Wire(over=) to be 'hosts' or 'all', got {self.over!r}.")

    @property
    def sends_differences(self) -> bool:
        """Whether parameters travel as codes of differences: int4 with feedback."""
        return self.gather == "int4" and self.feedback in (True, "gather")

    @property
    def keeps_residuals(self) -> bool:
        """Whether senders keep what coding has lost of gradients."""
        return self.reduce is not None and self.feedback in (True, "reduce")

    @property
    def keeps_whole(self) -> bool:
        """Whether each host keeps the whole model, of which what changes travels: deltas, and int4 with feedback."""
        return self.gather == "delta" or self.sends_differences

    def codes(self, *, one_host: bool, virtual_shards: int | None) -> bool:
        """Say whether anything is coded among ranks.

        Args:
            one_host: Whether they are on one host: they share memory, in which nothing travels, or are its GPUs.
            virtual_shards: Micro-batches of a step in deterministic mode, in which every number of ranks codes alike.
        """
        is_lossy = self.gather not in (None, "delta") or self.reduce is not None
        return self.over == "all" or not one_host or (is_lossy and virtual_shards is not None)
