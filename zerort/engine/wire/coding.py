"""`Coding`: which formats a runtime's values travel in, and which dtypes have one.

    zr.Wire(gather="int8")  ── Coding.of(…) ──>  Coding, or None where nothing is coded
                                                    ├─ alignment        where tensors and shards may begin
                                                    └─ range_codec, reduce_format    of a section's dtypes

Runtimes and forecasts ask the same value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from zerort.buffer import BlockCodes, Changes, DifferenceCodes, NonZeros, RangeCodec, Senders
from zerort.codec import FORMATS, LARGEST_BLOCK, Format, LargestFormat, SummandFormat
from zerort.config import TopK, Wire
from zerort.errors import CallError
from zerort.layout import itemsize
from zerort.layout.flat import ALIGNMENT
from zerort.optim import Sparsity

__all__ = ["UNCODED_OVER_COPIES", "Coding", "range_codec"]

UNCODED_OVER_COPIES: Final = "gradients travel uncoded over copies of the model"
"""What reports say where only the ranks that share a copy code."""

# Formats that each dtype of parameters can be gathered in; None: as it is, which is as short and exact.
_GATHERED: Final[dict[str, dict[str, Format | None]]] = {
    "float32": {"int8": FORMATS["int8"], "int4": FORMATS["int4"], "bfloat16": FORMATS["bfloat16"]},
    "bfloat16": {"int8": FORMATS["int8"], "int4": FORMATS["int4"], "bfloat16": None, "delta": None},
    # The scale of int4 is rounded up: the largest values of float16 would overflow.
    "float16": {"int8": FORMATS["int8"], "delta": None},
}

# Of gradients, which are summed in float32.
_REDUCED: Final[dict[str, dict[str, Format | None]]] = {
    "float32": _GATHERED["float32"],
    "bfloat16": _GATHERED["bfloat16"],
    "float16": {"int8": FORMATS["int8"], "int4": FORMATS["int4"]},
}


@dataclass(frozen=True, slots=True)
class Coding:
    """The formats of a runtime that codes."""

    wire: Wire
    by_shard: bool = False
    """Whether each virtual shard sends its own gradients: results do not depend on the number of ranks."""
    may_skip: bool = False
    """Whether a step may be skipped: what coding has lost is then as it was before."""
    by_delta: bool = False
    """Whether parameters travel as what has changed of them."""

    @classmethod
    def of(
        cls, wire: Wire | None, *, one_host: bool, virtual_shards: int | None, may_skip: bool = False
    ) -> Coding | None:
        """Return what is coded among ranks; None: nothing.

        Args:
            wire: What was asked for.
            one_host: Whether the ranks share memory, or on GPUs that of their host.
            virtual_shards: Micro-batches of a step in deterministic mode.
            may_skip: Whether a step may be skipped.
        """
        if wire is None or not wire.codes(one_host=one_host, virtual_shards=virtual_shards):
            return None
        by_delta = wire.gather == "delta" and (wire.over == "all" or not one_host)  # exact, so nowhere else
        return cls(wire, virtual_shards is not None, may_skip, by_delta)

    @property
    def alignment(self) -> int:
        """Elements that tensors and shards begin at multiples of: the least common multiple of all formats' blocks.

        So every payload but the last begins at a multiple of four bytes. Deltas have no blocks.
        """
        if self.wire.gather == "delta" and self.wire.reduce is None:
            return ALIGNMENT
        largest = LARGEST_BLOCK if isinstance(self.wire.reduce, TopK) else 1
        return math.lcm(ALIGNMENT, largest, *(one.block for one in FORMATS.values()))

    def senders(self, hosts: Sequence[int]) -> Senders:
        """Return who sends gradients among the ranks of one copy of the model, given a number for each one's host."""
        if self.by_shard or self.wire.over == "all":
            return Senders.of_ranks(len(hosts), size=len(hosts), alignment=self.alignment)
        return Senders.of_hosts(hosts, alignment=self.alignment)

    def residual_nbytes(self, dtype: str, numel: int) -> int:
        """Return the bytes that are kept of what coding loses of ``numel`` gradients of one sender."""
        kept_in = self.residual_dtype(dtype)
        return 0 if kept_in is None else itemsize(kept_in) * numel * (2 if self.may_skip else 1)

    def gather_format(self, dtype: str) -> Format | None:
        """Return what parameters of a dtype travel in; None: as they are, being exact and as short, or no numbers."""
        return _GATHERED.get(dtype, {}).get(self.wire.gather or "")

    def sends_deltas(self, dtype: str) -> bool:
        """Say whether parameters of a dtype travel as what has changed of them."""
        return self.by_delta and "delta" in _GATHERED.get(dtype, {})

    def sends_differences(self, dtype: str) -> bool:
        """Say whether parameters of a dtype travel as codes of what the whole of before lacks."""
        return self.wire.sends_differences and self.gather_format(dtype) is not None

    def keeps_whole(self, dtype: str) -> bool:
        """Say whether the whole of parameters of a dtype stays on each host: what travels is put into it."""
        return self.sends_deltas(dtype) or self.sends_differences(dtype)

    def reduce_format(self, dtype: str) -> SummandFormat | None:
        """Return what gradients that are summed in a dtype travel in; None: as they are."""
        if isinstance(self.wire.reduce, TopK):
            return LargestFormat(float(self.wire.reduce.fraction)) if dtype in _REDUCED else None
        return _REDUCED.get(dtype, {}).get(self.wire.reduce or "")

    def residual_dtype(self, dtype: str) -> str | None:
        """Return what ranks keep of what coding loses of gradients that are summed in a dtype; None: nothing."""
        format = self.reduce_format(dtype) if self.wire.keeps_residuals else None
        return None if format is None else format.residual_dtype

    def check_gathered(self, dtype: str, *, what: str) -> None:
        """Refuse parameters that cannot have the format that was asked for; whole numbers travel as they are.

        Raises:
            CallError: With ``what`` it is of.
        """
        if not dtype.startswith(("int", "uint", "bool")):
            _check("gather", self.wire.gather, dtype, _GATHERED.get(dtype, {}), what=what)

    def check_reduced(self, dtype: str, *, what: str) -> None:
        """Refuse gradients that are summed in a dtype without the format that was asked for.

        Raises:
            CallError: With ``what`` they are of.
        """
        wanted, legal = self.wire.reduce, _REDUCED.get(dtype, {})
        if not (isinstance(wanted, TopK) and legal):
            _check("reduce", wanted, dtype, legal, what=f"the gradient of {what}")

    def check_pruned(self, dtype: str, sparsity: Sparsity | None, *, what: str) -> None:
        """Refuse pruned parameters whose zeros would arrive as what differences leave of them.

        Raises:
            CallError: With ``what`` they are.
        """
        if sparsity is not None and self.sends_differences(dtype):
            raise CallError(
                f"Expected {what} without a Sparsity with Wire(gather='int4', feedback=True), whose differences bring "
                f"pruned elements to zero over several updates, got {sparsity}. Use gather='int8', or feedback=False."
            )

    def describe(self, *, gathered: Iterable[str], reduced: Iterable[str], copies: int = 1, ties: bool = False) -> str:
        """Return what travels in which format; empty if all does as it is.

        Args:
            gathered: Dtypes of parameters.
            reduced: Dtypes that gradients are summed in.
            copies: Copies of the model, over which sums of shards travel as they are.
            ties: Whether units hand in gradients of others' tensors, which travel as they are, too.
        """
        dtypes = list(gathered)
        gathers = any(self.gather_format(dtype) is not None or self.sends_deltas(dtype) for dtype in dtypes)
        reduces = any(self.reduce_format(dtype) is not None for dtype in reduced)
        exactly = " (lossless)" * (self.wire.gather == "delta")
        coded = [f"gather {self.wire.gather}{exactly}"] * gathers + [f"reduce {self.wire.reduce}"] * reduces
        of_sums, of_gathers = reduces and self.wire.keeps_residuals, any(map(self.sends_differences, dtypes))
        coded += ["feedback of both"] if of_sums and of_gathers else ["feedback"] * (of_sums or of_gathers)
        text = ", ".join(coded) + "; results depend on the number of ranks" * (reduces and not self.by_shard)
        text += f"; {UNCODED_OVER_COPIES}" * (reduces and copies > 1)
        return text + "; gradients of tied tensors travel uncoded from other units" * (reduces and ties)


def range_codec(coding: Coding | None, dtype: str, *, is_sparse: bool) -> RangeCodec | None:
    """Return what ranges of parameters travel as; None: as they are.

    Args:
        coding: What a runtime codes.
        dtype: The parameters'.
        is_sparse: Whether they are pruned, and cross hosts: between the GPUs of one they travel as they are.
    """
    if coding is not None and coding.sends_deltas(dtype):
        return Changes()
    if coding is not None and (format := coding.gather_format(dtype)) is not None:
        return DifferenceCodes(format) if coding.sends_differences(dtype) else BlockCodes(format)
    return NonZeros(itemsize(dtype)) if is_sparse else None


def _check(verb: str, wanted: str | TopK | None, dtype: str, legal: Collection[str], *, what: str) -> None:
    if wanted is None or wanted in legal:
        return
    names = " or ".join(repr(name) for name in FORMATS if name in legal)
    cure = f"Use Wire({verb}={names})." if names else "Convert it to float32, or leave wire= out."
    if wanted == "delta":
        cure = "Convert it to bfloat16 or float16, or leave gather= out."
    raise CallError(
        f"Expected {what} in a dtype that can travel as {wanted}, as Wire({verb}={wanted!r}) says, got {dtype}. {cure}"
    )
