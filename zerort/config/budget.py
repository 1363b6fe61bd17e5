"""`Budget`: how much there is of each memory, per rank, instead of tiers that somebody chose.

A runtime that is opened with one, or ``zerort plan``, finds the tiers: `zerort.engine.sizing.budget` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zerort.config.residence import ZERO
from zerort.config.sizes import format_bytes, parse_bytes
from zerort.errors import CallError, PlanError

__all__ = ["BESIDES_NBYTES", "Budget"]

BESIDES_NBYTES: Final = 32 * 1024**2
"""What a rank may hold besides its budget, at most: threads, blocks of the store, checksums, Python's own objects. The
interpreter, libraries, what the group holds and what the user computes with are not the runtime's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes that one rank may use of each memory. Made by `Plan.fit`.

    >>> print(Budget(host=8 * 1024**3, nvme=200 * 1024**3))
    ZeRO-3 within device 0B, host 8GiB, nvme 200GiB per rank
    """

    device: int = 0
    """Of the memory computing happens in."""

    host: int = 0
    """Of host memory. On a machine without a GPU this and `device` are one memory, and their sum is what counts."""

    nvme: int = 0
    """Of the disk."""

    stage: int = 3
    """The row of `ZERO` that says what is sharded."""

    @classmethod
    def build(cls, *, device: str | int = 0, host: str | int = 0, nvme: str | int = 0, stage: int = 3) -> Budget:
        """Read sizes as people write them: ``"8GiB"``, or a number of bytes."""
        sizes = {"device": device, "host": host, "nvme": nvme}
        return cls(**{name: _read(name, size) for name, size in sizes.items()}, stage=stage)

    def __post_init__(self) -> None:
        for name in ("device", "host", "nvme"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise CallError(f"Expected the budget of {name} in bytes, 0 or more, got {value!r}.")
        if type(self.stage) is not int or self.stage not in ZERO:
            raise PlanError(f"Expected a ZeRO stage out of {', '.join(map(str, ZERO))}; got {self.stage!r}.")
        if not self.memory:
            raise PlanError(
                "Expected a budget of memory to compute in, got none. Name device=, host= or both: "
                "Plan.fit(host='8GiB', nvme='200GiB')."
            )

    @property
    def memory(self) -> int:
        """Bytes of device and host together."""
        return self.device + self.host

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {format_bytes(getattr(self, name))}" for name in ("device", "host", "nvme"))
        return f"ZeRO-{self.stage} within {sizes} per rank"


def _read(name: str, size: str | int) -> int:
    try:
        nbytes = parse_bytes(size) if isinstance(size, str) else size  # a number is proven with the others
    except CallError as error:
        raise CallError(f"Expected the budget of {name} as a size such as '8GiB', got {size!r}.") from error
    if type(nbytes) is int and 0 < nbytes < 1024:
        raise CallError(f"Expected the budget of {name} in bytes, got {size!r}. Did you mean '{nbytes}GiB'?")
    return nbytes
