"""What `zr.open` is given besides options: a plan, an optimizer, parameter groups, ranks. Each is what it is called.

check_ranks(group, mesh)                 before anybody can be asked: on this rank alone
check_nouns(plan, optimizer, param_groups)     where all ranks hear of it
"""

from __future__ import annotations

from collections.abc import Sequence

from zerort.comm import Group
from zerort.config import Budget, Plan
from zerort.engine.mesh import Mesh
from zerort.errors import CallError
from zerort.optim import Optimizer, ParameterGroup

__all__ = ["check_nouns", "check_ranks"]


def check_ranks(group: object, mesh: object) -> None:
    """Raise unless there is a group, or a mesh, or neither."""
    if mesh is not None and group is not None:
        raise CallError("Expected a mesh or a group, got both. A mesh has its group.")
    if not isinstance(group, (Group, type(None))):
        raise CallError(
            f"Expected group to be a Group, which zr.open_group() opens, got {group!r}. Leave it out for all "
            "ranks that mpirun started."
        )
    if not isinstance(mesh, (Mesh, type(None))):
        raise CallError(f"Expected mesh to be a Mesh such as zr.mesh(shard=4, replicate=2), got {mesh!r}.")


def check_nouns(plan: object, optimizer: object, param_groups: object) -> None:
    """Raise unless a plan, an optimizer and parameter groups are what they are called."""
    if not isinstance(plan, (Plan, Budget)):
        cure = f" Write zr.Plan.zero({plan})." if plan in (0, 1, 2, 3) else ""
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
    if kind.__module__.startswith("torch.optim"):
        return f" Let it work on shards: zerort_torch.optimizer(torch.optim.{kind.__name__}, lr=1e-3)."
    return ""
