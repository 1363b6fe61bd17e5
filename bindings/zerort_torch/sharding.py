"""`shard`: hands a model's parameters to a runtime, unit by unit, and hooks their gathering into its forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch

from zerort.comm.agreed import raise_together
from zerort.engine import Runtime, TensorSpec
from zerort.errors import CallError, ZerortError
from zerort_torch.buffers import SharedBuffers
from zerort_torch.finding import FoundUnit, Units, find_units
from zerort_torch.gradients import gradients_of
from zerort_torch.guard import guard_optimizers
from zerort_torch.hooks import carry_over, check_hooks, hooks_of
from zerort_torch.materialise import Init, is_meta, materialise, materialise_buffers
from zerort_torch.memory import as_array, check_device, check_torch, on_torchs_stream, share_memory, torch_device
from zerort_torch.resting import RestingParameter, pickling_refusal
from zerort_torch.saved import SavedWeights
from zerort_torch.state_dict import hook_state_dict
from zerort_torch.strays import Strays, kept_in_containers
from zerort_torch.support import check_supported
from zerort_torch.unit import TorchUnit

__all__ = ["Sharding", "shard", "sharding_of", "units_within"]

Model = TypeVar("Model", bound="torch.nn.Module")


class Sharding:
    """What a sharded model's modules and units have to do with each other."""

    def __init__(self, rt: Runtime, units: list[TorchUnit]) -> None:
        self.rt = rt
        self.units = units
        self.saved = SavedWeights(rt, units)


_shardings: WeakKeyDictionary[Any, Sharding] = WeakKeyDictionary()  # by module, of every module of a sharded model


def sharding_of(module: torch.nn.Module) -> Sharding:
    """Return the sharding that a module is part of.

    Raises:
        CallError: It is part of none.
    """
    found = _shardings.get(module)
    if found is None:
        raise CallError(
            f"Expected a module of a sharded model, got {type(module).__name__}. Shard it first: zt.shard(model, rt)."
        )
    return found


def units_within(module: torch.nn.Module) -> Iterator[TorchUnit]:
    """Yield the units that hold parameters of ``module``, in order."""
    inside = set(module.modules())
    for unit in sharding_of(module).units:
        if any(place in inside for weight in unit.weights for place, _ in weight.places):
            yield unit


def shard(
    model: Model,
    rt: Runtime,
    *,
    units: Units = None,
    name: str = "",
    init: Init | None = None,
    broadcast: bool = False,
) -> Model:
    """Hand a model's parameters to a runtime. Every rank calls this with the same model.

    From then on ``model(x)`` gathers what it needs, ``loss.backward()`` sums gradients over the ranks as they become
    ready, and ``rt.step()`` updates, and gives all ranks rank 0's buffers.

    Args:
        model: The model, with the same values on every rank; changed in place. On the meta device, it gets memory and
            values unit by unit.
        rt: The runtime that trains it.
        units: What is gathered together: None finds the blocks that repeat; module types; or a callable of a module's
            name and the module. Parameters in none of them make one more unit.
        name: What to put before all names; for several models in one runtime.
        init: Gives a module's own parameters values, if they are on the meta device; None: ``reset_parameters()``.
        broadcast: Take rank 0's values instead of checking that all ranks have the same.

    Returns:
        The model.

    Raises:
        CallError: It cannot be sharded, or differs between ranks; on every rank.
    """
    if not isinstance(rt, Runtime):
        raise CallError(f"Expected a runtime, as zr.open() gives one, got {type(rt).__name__}: zt.shard(model, rt).")
    rt.context.check_open("shard")
    found: list[FoundUnit] = []
    error: ZerortError | None = None
    try:
        check_torch(rt.device)
        share_memory(rt.device)
        found = _find(model, units, device=torch_device(rt.device))
    except ZerortError as caught:
        error = caught
    raise_together(rt.world, error, name="shard")
    gradients = gradients_of(rt)
    lasting = set(model.state_dict())
    made: dict[str, TorchUnit] = {}
    originals = [(one.full, weakref.ref(one.value)) for unit in found for one in unit.parameters]
    unregistered = list(kept_in_containers(model))
    guard_optimizers((one.full, one.value) for unit in found for one in unit.parameters)
    if rt.context.budget is not None:
        _announce(rt, found, name=name)
    for one in found:
        made[one.name] = unit = _register(rt, one, name=name, init=init, broadcast=broadcast)
        gradients.add_unit(unit, spread=one.name == "" and len(found) > 1)
    meta_buffers = any(buffer.is_meta for buffer in model.buffers())
    materialise_buffers(model, init, device=torch_device(rt.device))
    buffers = SharedBuffers(rt, model, name=name, lasting=lasting)
    if buffers:
        rt.attachments.append(buffers)
        if broadcast or meta_buffers:
            with on_torchs_stream(rt.device):
                buffers.send()
    for one in found:
        made[one.name].lenders = tuple(made[lender] for lender in sorted(one.borrows))
    ordered = [made[one.name] for one in found]
    sharding = Sharding(rt, ordered)
    for module in model.modules():
        _shardings[module] = sharding
    for one, unit in zip(found, ordered, strict=True):
        for holder in dict.fromkeys(one.held_by):
            _hold_during_forward(holder, unit.hold, unit.let_go)
    _hook_model(model, sharding, gradients.begin_forward)
    hook_state_dict(rt, ordered)
    guard_optimizers((weight.full, weight.resting) for unit in ordered for weight in unit.weights)
    strays = Strays(rt, model, ordered)
    for full, reference in originals:
        original = reference()
        if original is not None:
            strays.watch_object(original, full, "was before zt.shard(model, rt)")
    for full, one in unregistered:
        strays.watch_object(one, full, "holds")
    rt.attachments.append(strays)
    return model


def _find(model: object, units: Units, *, device: torch.device) -> list[FoundUnit]:
    if not isinstance(model, torch.nn.Module):
        raise CallError(f"Expected a torch.nn.Module, got {type(model).__name__}.")
    check_supported(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, RestingParameter) or model in _shardings:
            raise CallError(f"Expected a model that is not sharded yet, got one whose {name!r} is.")
        check_hooks(name, parameter)
        check_device(name, parameter.device, device)
    found = find_units(model, units)
    if not found:
        raise CallError(f"Expected a model with parameters, got {type(model).__name__} without any.")
    return found


def _announce(rt: Runtime, found: Sequence[FoundUnit], *, name: str) -> None:
    """Tell the runtime of all units before the first one comes, so that a budget is shared out over all of them."""
    units, frozen = {}, {}
    for one in found:
        if one.parameters:
            full = _full_name(name, one)
            values = {parameter.local: parameter.value for parameter in one.parameters}
            units[full] = {
                local: TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))
                for local, value in values.items()
            }
            frozen[full] = [local for local, value in values.items() if not value.requires_grad].__contains__
    rt.expect(units, frozen=frozen)


def _full_name(name: str, found: FoundUnit) -> str:
    return ".".join(part for part in (name, found.name) if part)


def _register(rt: Runtime, found: FoundUnit, *, name: str, init: Init | None, broadcast: bool) -> TorchUnit:
    if not found.parameters:
        return TorchUnit(None, found, rt=rt)
    hooks = hooks_of(found)  # before materialise, which makes new parameters
    meta = is_meta(found)
    error: ZerortError | None = None
    try:
        if meta:
            materialise(found, init, device=torch_device(rt.device))
    except ZerortError as caught:
        error = caught
    raise_together(rt.world, error, name="shard")
    frozen = [parameter.local for parameter in found.parameters if not parameter.value.requires_grad]
    with on_torchs_stream(rt.device):
        unit = rt.register(
            _full_name(name, found),
            {parameter.local: as_array(parameter.value, rt.device) for parameter in found.parameters},
            frozen=frozen.__contains__,
            broadcast=broadcast or meta,
        )
        torch_unit = TorchUnit(unit, found, rt=rt)
    for weight, mine in zip(torch_unit.weights, hooks, strict=True):
        carry_over(mine, to=weight.live)
    found.parameters.clear()  # and with them the memory that the model came in
    return torch_unit


def _hold_during_forward(module: torch.nn.Module, hold: Callable[[], None], let_go: Callable[[], None]) -> None:
    module.register_forward_pre_hook(_Hook(hold), prepend=True)
    module.register_forward_hook(_Hook(let_go), always_call=True)


class _Hook:
    """A hook of a module: calls a function, and refuses to be pickled with the model."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, module: torch.nn.Module, *values: object) -> None:
        self._call()

    def __deepcopy__(self, memo: object) -> _Hook:
        return self  # as a function would: the model's parameters say what is wrong

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise pickling_refusal("the model")


def _hook_model(model: torch.nn.Module, sharding: Sharding, begin: Callable[[], None]) -> None:
    """Put round the whole model's forward what is not any unit's business."""
    comes_and_goes = any(not unit.in_memory for unit in sharding.units)
    if comes_and_goes:
        sharding.rt.attachments.append(sharding.saved)

    def enter() -> None:
        if torch.is_grad_enabled():
            begin()
        if comes_and_goes:
            sharding.saved.enter()

    def leave() -> None:
        if comes_and_goes:
            sharding.saved.leave()

    _hold_during_forward(model, enter, leave)
