"""`Coding`: which formats a runtime's values travel in, and which dtypes have one.

    zr.Wire(gather="int8")  ── Coding.of(…) ──>  Coding, or None where nothing is coded
                                                    ├─ alignment        where tensors and shards may begin
                                                    └─ gather_format, reduce_format    of a section's dtypes

Runtimes and forecasts ask the same value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from zerort.codec import FORMATS, Format
from zerort.config import Wire
from zerort.errors import CallError
from zerort.layout.flat import ALIGNMENT

__all__ = ["Coding"]

# Formats that each dtype of parameters can be gathered in; None: as it is, which is as short and exact.
_GATHERED: Final[dict[str, dict[str, Format | None]]] = {
    "float32": {"int8": FORMATS["int8"], "int4": FORMATS["int4"], "bfloat16": FORMATS["bfloat16"]},
    "bfloat16": {"int8": FORMATS["int8"], "int4": FORMATS["int4"], "bfloat16": None},
    "float16": {"int8": FORMATS["int8"]},  # the scale of int4 is rounded up: its largest values would overflow
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
    depends: bool = False
    """Whether results depend on the number of ranks."""

    @classmethod
    def of(cls, wire: Wire | None, *, one_memory: bool, virtual_shards: int | None) -> Coding | None:
        """Return what is coded among ranks; None: nothing.

        Args:
            wire: What was asked for.
            one_memory: Whether the ranks share memory.
            virtual_shards: Micro-batches of a step in deterministic mode.
        """
        if wire is None or not wire.codes(one_memory=one_memory, virtual_shards=virtual_shards):
            return None
        return cls(wire, wire.reduce is not None and virtual_shards is None)

    @property
    def alignment(self) -> int:
        """Elements that tensors and shards begin at multiples of: the least common multiple of all formats' blocks.

        So every payload but the last begins at a multiple of four bytes.
        """
        return math.lcm(ALIGNMENT, *(one.block for one in FORMATS.values()))

    def gather_format(self, dtype: str) -> Format | None:
        """Return what parameters of a dtype travel in; None: as they are, being exact and as short, or no numbers."""
        return _GATHERED.get(dtype, {}).get(self.wire.gather or "")

    def reduce_format(self, dtype: str) -> Format | None:
        """Return what gradients that are summed in a dtype travel in; None: as they are."""
        return _REDUCED.get(dtype, {}).get(self.wire.reduce or "")

    def keeps_residual(self, dtype: str) -> bool:
        """Say whether ranks keep what coding loses of gradients that are summed in a dtype."""
        return self.wire.feedback and self.reduce_format(dtype) is not None

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
        _check("reduce", self.wire.reduce, dtype, _REDUCED.get(dtype, {}), what=f"the gradient of {what}")

    def describe(self, *, gathered: Iterable[str], reduced: Iterable[str]) -> str:
        """Return what travels in which format; empty if all does as it is.

        Args:
            gathered: Dtypes of parameters.
            reduced: Dtypes that gradients are summed in.
        """
        gathers = any(self.gather_format(dtype) is not None for dtype in gathered)
        reduces = any(self.reduce_format(dtype) is not None for dtype in reduced)
        coded = [f"gather {self.wire.gather}"] * gathers + [f"reduce {self.wire.reduce}"] * reduces
        coded += ["feedback"] * (reduces and self.wire.feedback)
        return ", ".join(coded) + "; results depend on the number of ranks" * (reduces and self.depends)


def _check(verb: str, wanted: str | None, dtype: str, legal: Collection[str], *, what: str) -> None:
    if wanted is None or wanted in legal:
        return
    names = " or ".join(repr(name) for name in FORMATS if name in legal)
    cure = f"Use Wire({verb}={names})." if names else "Convert it to float32, or leave wire= out."
    raise CallError(
        f"Expected {what} in a dtype that can travel as {wanted}, as Wire({verb}={wanted!r}) says, got {dtype}. {cure}"
    )
