"""`read_model`: what a model consists of, from whatever describes it. No tensor is loaded.

    params.json                  {"block0": {"w": [1024, 1024], "b": {"shape": [1024], "dtype": "bfloat16"}}}
    model.safetensors            its head: 8 bytes of length, then names, shapes and dtypes as JSON
    model.safetensors.index.json the heads of all files that it names
    run/checkpoint               the manifest of a zerort checkpoint
    package.module:function      what the function returns: as in params.json, or arrays and TensorSpecs by name

Where names come without units, a unit is what is numbered together (``model.layers.3``), else what a name says before
its last dot.
"""

from __future__ import annotations

import importlib
import json
import operator
import os
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zerort.checkpoint import read_manifest
from zerort.checkpoint.format.coded import stored_tensors
from zerort.checkpoint.format.safetensors import DTYPES, MOST_HEAD
from zerort.cli.arguments import UsageError
from zerort.engine.model.tensors import TensorSpec
from zerort.errors import CallError, CheckpointError
from zerort.layout import ITEMSIZES
from zerort.layout.dtypes import TRAINABLE

__all__ = ["Model", "group_names", "read_model"]

Model = dict[str, dict[str, TensorSpec]]
"""Tensors by unit and name."""

_NUMBERED: Final = re.compile(r"(.*?\d+)(?:\.|$)")
_FUNCTION: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SAFETENSORS: Final = {theirs: ours for ours, theirs in DTYPES.items()}
_FORMS: Final = "a parameter list (.json), a .safetensors file, a checkpoint's directory, or module:function"


def read_model(text: str, *, dtype: str | None = None) -> Model:
    """Return the tensors that ``text`` names.

    Args:
        text: A path or ``module:function``; see the table above.
        dtype: What floating-point tensors will be trained in, instead of what is written there.

    Raises:
        UsageError: There is nothing of that kind, or it cannot be read.
    """
    model = _read(text)
    if not any(tensors for tensors in model.values()):
        raise UsageError(f"Expected a model with tensors, got none in {text}.")
    if dtype is None:
        return model
    return {
        unit: {
            name: TensorSpec(spec.shape, dtype if "float" in spec.dtype else spec.dtype)
            for name, spec in tensors.items()
        }
        for unit, tensors in model.items()
    }


def group_names(tensors: Mapping[str, TensorSpec]) -> Model:
    """Put tensors into units by their names.

    >>> list(group_names(dict.fromkeys(["model.layers.0.w", "model.norm.w", "block1.w", "scale"], TensorSpec(()))))
    ['model.layers.0', 'model.norm', 'block1', '']
    """
    units: Model = {}
    for full, spec in tensors.items():
        numbered = _NUMBERED.match(full)
        unit = numbered[1] if numbered and numbered[1] != full else full.rpartition(".")[0]
        units.setdefault(unit, {})[full[len(unit) + 1 :] if unit else full] = spec
    return units


def _read(text: str) -> Model:
    path = Path(text)
    if path.is_dir():
        return _of_checkpoint(path)
    if path.is_file():
        return _of_safetensors(path) if path.suffix == ".safetensors" else _of_json(path)
    if _FUNCTION.fullmatch(text):
        return _of_function(text)
    raise UsageError(f"Expected {_FORMS}; got {text!r}, which is not there.")


def _of_checkpoint(path: Path) -> Model:
    try:
        stored = stored_tensors(read_manifest(path), "parameter")
    except (CallError, CheckpointError) as error:
        raise UsageError(str(error)) from error
    return group_names({name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in stored.items()})


def _of_safetensors(path: Path) -> Model:
    return group_names(_head_of(path))


def _head_of(path: Path) -> dict[str, TensorSpec]:
    with path.open("rb") as file:
        begin = file.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
        if not 2 <= length <= min(MOST_HEAD, path.stat().st_size - 8):
            raise UsageError(f"Expected {path} to begin with the length of its head, as safetensors do; got {length}.")
        head = _parse(file.read(length), path)
    if not isinstance(head, dict):
        raise UsageError(f"Expected the head of {path} to be a JSON object, got {type(head).__name__}.")
    tensors = {}
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        known = _SAFETENSORS.get(str(entry.get("dtype"))) if isinstance(entry, dict) else None
        if known is None:
            choices = ", ".join(_SAFETENSORS)
            raise UsageError(f"Expected {name!r} in {path} with a dtype out of {choices}; got {entry!r}.")
        tensors[name] = _spec(name, {"shape": entry.get("shape"), "dtype": known})
    return tensors


def _of_json(path: Path) -> Model:
    document = _parse(path.read_bytes(), path)
    if isinstance(document, dict) and isinstance(document.get("weight_map"), dict):
        files = [*dict.fromkeys(str(name) for name in document["weight_map"].values())]
        wrong = [name for name in files if not _is_beside(name) or not os.path.isfile(path.parent / name)]
        if wrong:
            raise UsageError(f"Expected the files that {path} names beside it, got no {wrong[0]!r} there.")
        return group_names({name: spec for file in files for name, spec in _head_of(path.parent / file).items()})
    return _units(document, str(path))


def _is_beside(name: str) -> bool:
    """Say whether a name leads below its folder; a link there may lead on, as in Hugging Face's cache."""
    return bool(name) and not os.path.isabs(name) and ".." not in Path(name).parts


def _of_function(text: str) -> Model:
    module, _, function = text.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        made = getattr(importlib.import_module(module), function)()
    except Exception as error:  # the function is the user's
        raise UsageError(f"Expected {text} to return a model, got {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    return _units(made, text)


def _units(document: Any, where: str) -> Model:
    """Read tensors by unit and name, or by name alone."""
    if not isinstance(document, Mapping):
        raise UsageError(f"Expected tensors by name, or by unit and name, in {where}; got {type(document).__name__}.")
    if all(isinstance(entry, Mapping) and "shape" not in entry for entry in document.values()):
        return {
            str(unit): {str(name): _spec(f"{unit}.{name}", entry) for name, entry in tensors.items()}
            for unit, tensors in document.items()
        }
    return group_names({str(name): _spec(str(name), entry) for name, entry in document.items()})


def _spec(name: str, entry: Any) -> TensorSpec:
    """Read a tensor: its shape, a mapping with ``shape`` and ``dtype``, an array or a TensorSpec."""
    shape, dtype = entry, "float32"
    if isinstance(entry, Mapping):
        unknown = entry.keys() - {"shape", "dtype"}
        if unknown or "shape" not in entry:
            got = f"the key {sorted(unknown)[0]!r}" if unknown else "no shape"
            raise UsageError(f"Expected 'shape' and 'dtype' for {name!r}, got {got}.")
        shape, dtype = entry["shape"], entry.get("dtype", dtype)
    elif hasattr(entry, "shape"):
        shape, dtype = entry.shape, str(getattr(entry, "dtype", dtype)).removeprefix("torch.")
    if isinstance(shape, str) or not isinstance(shape, Sequence) or not all(_is_length(axis) for axis in shape):
        raise UsageError(f"Expected the shape of {name!r} as a list of whole numbers, got {shape!r}.")
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise UsageError(f"Expected a dtype such as {', '.join(TRAINABLE)} for {name!r}, got {dtype!r}.")
    return TensorSpec(tuple(map(int, shape)), dtype)


def _is_length(axis: object) -> bool:
    try:
        return not isinstance(axis, bool) and operator.index(axis) >= 0  # type: ignore[arg-type]
    except TypeError:
        return False


def _parse(text: bytes, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"Expected {path} to hold JSON, got something else: {error}.") from error
