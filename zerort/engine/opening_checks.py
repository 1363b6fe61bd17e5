"""What `zr.open` is given besides options: a plan, an optimizer, parameter groups, ranks. Each is what it is called.

check_ranks(group, mesh, device)               before anybody can be asked: on this rank alone
check_nouns(plan, optimizer, param_groups)     where all ranks hear of it
"""

from __future__ import annotations

from collections.abc import Sequence

from zerort.comm import Group
from zerort.config import Budget, Plan
from zerort.engine.mesh import MeshShape
from zerort.errors import CallError
from zerort.optim import Optimizer, ParameterGroup
from zerort.typing import loaded_class

__all__ = ["check_nouns", "check_ranks"]


def check_ranks(group: object, mesh: object, device: object) -> None:
    """Raise unless group, mesh and device are what they are called, and go together."""
    if not isinstance(group, (Group, type(None))):
        raise CallError(
            f"Expected group to be a Group, which zr.open_group() opens, got {group!r}. Leave it out for all "
            "ranks that mpirun started."
        )
    if not isinstance(mesh, (MeshShape, type(None))):
        raise CallError(f"Expected mesh to be one such as zr.mesh(shard=4, replicate=2), got {mesh!r}.")
    if mesh is not None and mesh.group is not None:
        if group is not None:
            raise CallError("Expected one group, got that of zr.open and that of the mesh. Leave one of them out.")
        group = mesh.group
    if device not in (None, "host", "cuda"):
        raise CallError(f"Expected device to be 'host' or 'cuda', got {device!r}. Each rank of a host has one GPU.")
    if group is not None and device is not None and (device == "host") != group.device.in_host_memory:
        raise CallError(
            f"Expected device={device!r} where the runtime opens its own group, or a group of that device; got one on "
            f"{group.device.name}. Leave group= out, or device=."
        )


def check_nouns(plan: object, optimizer: object, param_groups: object) -> None:
    """Raise unless a plan, an optimizer and parameter groups are what they are called."""
    if not isinstance(plan, (Plan, Budget)):
        stage = str(plan).lower().removeprefix("zero").strip("-_ ")  # 3, "zero3", "ZeRO-3"
        cure = f" Write zr.Plan.zero({stage})." if stage in ("0", "1", "2", "3") else ""
        raise CallError(
            "Expected plan to be a Plan such as zr.Plan.zero(3), or a budget, zr.Plan.fit(host='8GiB'); got "
            f"{_name(plan)}.{cure}"
        )
    if not isinstance(optimizer, Optimizer):
        raise CallError(
            f"Expected optimizer to be one such as zr.AdamW(lr=1e-3), got {_name(optimizer)}.{_cure_of(optimizer)}"
        )
    if not isinstance(param_groups, Sequence) or not all(isinstance(one, ParameterGroup) for one in param_groups):
        raise CallError(
            "Expected param_groups to be a list of parameter groups such as "
            f"[zr.ParameterGroup('*.bias', weight_decay=0.0)], got {_name(param_groups)}."
        )
    for one in param_groups:
        one.check(optimizer)


def _name(value: object) -> str:
    """Return what a value is, in less than a line: models are long."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"an object of the class {type(value).__qualname__}"


def _cure_of(optimizer: object) -> str:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(kind, Optimizer):
        return f" Make one of it: zr.{kind.__name__}(lr=1e-3)."
    if issubclass(kind, loaded_class("torch.optim", "Optimizer")):
        return f" Let it work on shards: zerort_torch.optimizer(torch.optim.{kind.__name__}, lr=1e-3)."
    return ""
