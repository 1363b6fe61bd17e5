"""`MemoryHistory`: peaks of past steps, kept in a small file of JSON lines beside the run.

    {"model": "5c0e…", "memory": "host", "plan": "…", "ranks": 2, "batch": 8.0, "layout": 812…, "besides": 390…, …}

A line for each plan and batch size, of which those within some 4 % count as one, and another line when its peak grows
by a hundredth: the file does not grow with the number of steps, even if each has a batch of its own (tokens). What a
step takes is told in two parts: the layout, which is known of any plan (`forecast`), and the rest, which a prediction
is made from (`predicting.py`, decision 0137).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Final

from zerort.engine.model.tensors import TensorSpec
from zerort.errors import CallError, StorageError

__all__ = ["MemoryHistory", "Peak", "model_key"]

_GROWTH: Final = 1.01
"""What the rest of a step has to be times what was known, to be told again."""
_SIZES: Final = 16
"""Batch sizes that are told apart, between one and twice as much."""
_BEGIN: Final = '{"model": "'
"""How every line begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most memory that a step of one batch size took under one plan, on the rank that took most."""

    model: str
    """Which tensors: `model_key`."""
    memory: str
    """Which memory: ``"host"``, or ``"gpu"``."""
    plan: str
    """What lay where."""
    ranks: int
    """How many trained together."""
    batch: float
    """Samples of a micro-step; 0: not known."""
    layout: int
    """Bytes of the runtime's own arrays, as `Runtime.memory` counts them."""
    besides: int
    """Bytes at most beside those: activations, the program, its libraries."""
    idle: int
    """The same without activations, about: what there was before the model, or is left when a step's are gone."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value).__name__ != field.type:
                raise CallError(f"Expected {field.name} of a peak to be a {field.type}, got {value!r}.")


def model_key(units: Mapping[str, Mapping[str, TensorSpec]]) -> str:
    """Return what stands for a model: its shapes and dtypes, in whatever units and under whatever names they are."""
    shapes = sorted([list(spec.shape), spec.dtype] for tensors in units.values() for spec in tensors.values())
    return hashlib.blake2b(json.dumps(shapes).encode(), digest_size=8).hexdigest()


class MemoryHistory:
    """Peaks of this run and of those before it, of all models that the file has.

    Args:
        path: The file; it need not be there.

    Raises:
        CallError: It is there, and no history.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._peaks: dict[_Key, Peak] = {}
        text = _text_of(path)
        lines = text.splitlines()
        self._torn: tuple[int, int] | None = None  # bytes of the file with its last line, and without, if that is torn
        if lines and not text.endswith("\n") and _is_torn(lines[-1]):
            torn, nbytes = lines.pop(), len(text.encode())
            self._torn = nbytes, nbytes - len(torn.encode())
            warnings.warn(
                f"Expected {path} to end with a whole line, got {torn[:60]!r}: a run has ended while it wrote it. The "
                "line is left out.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._before = "\n" if text and not text.endswith("\n") and self._torn is None else ""  # its end alone is gone
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._keep(_read(line, f"line {number} of {path}"))

    def of(self, model: str, *, memory: str) -> list[Peak]:
        """Return what is known of a model's steps in one memory."""
        return [one for one in self._peaks.values() if (one.model, one.memory) == (model, memory)]

    def add(self, peak: Peak, *, write: bool) -> bool:
        """Take a step's peak over if it tells something; say whether it did.

        Args:
            peak: The peak.
            write: Whether to write it to the file: one of the ranks does.

        Raises:
            StorageError: The file cannot be written to.
        """
        known = self._peaks.get(_key(peak))
        if known is not None and peak.besides <= _GROWTH * known.besides:
            return False
        self._keep(peak)
        if write:
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    if self._torn is not None and os.fstat(file.fileno()).st_size == self._torn[0]:
                        file.truncate(self._torn[1])  # unless another run has done so
                    file.write(self._before + json.dumps(asdict(peak)) + "\n")
                self._torn, self._before = None, ""
            except OSError as error:
                raise StorageError(f"Expected to write a step's memory to {self.path}, got {error}.") from error
        return True

    def _keep(self, peak: Peak) -> None:
        known = self._peaks.get(_key(peak))
        if known is None or known.besides < peak.besides:
            self._peaks[_key(peak)] = peak


_Key = tuple[str, str, str, int, int | None]


def _key(peak: Peak) -> _Key:
    size = round(_SIZES * math.log2(peak.batch)) if peak.batch > 0 else None
    return peak.model, peak.memory, peak.plan, peak.ranks, size


def _read(line: str, where: str) -> Peak:
    try:
        return Peak(**json.loads(line))
    except (CallError, TypeError, ValueError) as error:
        raise CallError(
            f"Expected the peak of a step as JSON in {where}, got {line[:60]!r}. Name the file of a run with "
            "history=, or one that is not there yet."
        ) from error


def _is_torn(line: str) -> bool:
    """Say whether a line is the beginning of a peak: of any other file nothing is cut off."""
    try:
        json.loads(line)
    except ValueError:
        return line.startswith(_BEGIN) or _BEGIN.startswith(line)
    return False


def _text_of(path: str) -> str:
    if not os.path.exists(path):
        return ""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise CallError(f"Expected history={path!r} to be a file of JSON lines, got {error}.") from error
