"""What is registered: `TensorSpec` for tensors without values, and the checks of tensors and gradients."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerort.buffer import unit_title
from zerort.errors import CallError
from zerort.native.dtypes import numpy_dtype
from zerort.typing import Array, Device, loaded_class, type_name

__all__ = [
    "Frozen",
    "TensorSpec",
    "aliases_in",
    "check_gradient",
    "declare",
    "frozen_in",
    "full_name",
    "is_frozen",
    "on_host",
]

Frozen = bool | str | Sequence[str] | Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without values: it starts as zeros, to be loaded from a checkpoint or assigned."""

    shape: tuple[int, ...]
    dtype: str = "float32"


def declare(unit: str, params: Mapping[str, Array | TensorSpec]) -> dict[str, TensorSpec]:
    """Return what each parameter is, or say which cannot be one.

    Raises:
        CallError: A name or a value cannot be used.
    """
    if not isinstance(params, Mapping):
        raise CallError(
            f"Expected the parameters of {unit_title(unit)} as a mapping from names to arrays, got "
            f'{type(params).__name__}. Name them: rt.register({unit!r}, {{"w": array}}).'
        )
    declared = {}
    for name, value in params.items():
        if not isinstance(name, str) or not name:
            raise CallError(f"Expected names of {unit_title(unit)}'s parameters to be texts, got {name!r}.")
        if isinstance(value, TensorSpec):
            declared[name] = TensorSpec(tuple(value.shape), numpy_dtype(value.dtype).name)
        elif isinstance(value, np.ndarray):
            declared[name] = TensorSpec(value.shape, value.dtype.name)
        else:
            raise CallError(
                f"Expected {name!r} of {unit_title(unit)} as a NumPy array or a TensorSpec, got "
                f"{type(value).__name__}. {_way_in(value)}"
            )
    return declared


def _way_in(value: object) -> str:
    """Return how to register what is not NumPy's."""
    if isinstance(value, loaded_class("torch", "Tensor")):
        return "Tensors of torch come in with their model: zerort_torch.shard(model, rt)."
    if isinstance(value, (list, tuple, int, float)):
        return "Make it an array: np.array(value, np.float32)."
    return "Arrays of other frameworks come in through their bindings."


def on_host(params: Any, *, device: Device) -> Any:
    """Return parameters with those of a device copied to the host, each once. What is no mapping stays as it is."""
    if not isinstance(params, Mapping):
        return params
    copies: dict[tuple[object, ...], Array] = {}
    found: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, np.ndarray) or not device.owns(value):
            found[name] = value
            continue
        key = (value.data.ptr, value.shape, value.strides, value.dtype)
        if key not in copies:
            copies[key] = device.fetch(value)
        found[name] = copies[key]
    return found


def aliases_in(params: Mapping[str, Array | TensorSpec]) -> dict[str, str]:
    """Return which names mean an array that came under another name before."""
    seen: dict[tuple[object, ...], str] = {}
    aliases = {}
    for local, value in params.items():
        if isinstance(value, np.ndarray) and value.size:
            key = (value.ctypes.data, value.shape, value.strides, value.dtype)
            if key in seen:
                aliases[local] = seen[key]
            seen.setdefault(key, local)
    return aliases


def full_name(unit: str, name: str) -> str:
    """Return what a unit's tensor is called in checkpoints, groups and reports; a unit without a name adds none.

    >>> full_name("block0", "attn.weight"), full_name("", "head.weight")
    ('block0.attn.weight', 'head.weight')
    """
    return f"{unit}.{name}" if unit else name


def is_frozen(frozen: Frozen, name: str) -> bool:
    """Say whether ``frozen`` (all, glob patterns, or a callable) means ``name``."""
    if isinstance(frozen, bool):
        return frozen
    if callable(frozen):
        return bool(frozen(name))
    patterns = (frozen,) if isinstance(frozen, str) else frozen
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def frozen_in(unit: str, frozen: Frozen | Mapping[str, Frozen]) -> Frozen:
    """Return what ``frozen`` says of a unit: the same for all of them, or by unit."""
    return frozen.get(unit, False) if isinstance(frozen, Mapping) else frozen


def check_gradient(
    unit: str,
    name: str,
    gradient: Any,
    *,
    shape: tuple[int, ...],
    dtypes: tuple[np.dtype[Any], ...],
    device: Device,
) -> None:
    """Refuse what cannot be the gradient of a tensor of ``shape``.

    Raises:
        CallError: It is no array, or of another shape or dtype.
    """
    if device.owns(gradient) and gradient.shape == shape and gradient.dtype in dtypes:
        return
    what = f"the gradient of {name!r} ({unit_title(unit)})"
    if not device.owns(gradient):
        raise CallError(f"Expected {what} as {device.arrays}, got {type_name(gradient)}.")
    if gradient.shape != shape:
        raise CallError(f"Expected {what} in the parameter's shape {list(shape)}, got {list(gradient.shape)}.")
    names = " or ".join(dict.fromkeys(dtype.name for dtype in dtypes))
    raise CallError(
        f"Expected {what} in {names}, got {gradient.dtype}. Compute in the parameter's dtype, or convert it: "
        f"gradient.astype({dtypes[0].name!r})."
    )
