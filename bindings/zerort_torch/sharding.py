"""`shard`: hands a model's parameters to a runtime, unit by unit, and hooks their gathering into its forward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch

from zerort import Runtime, TensorSpec
from zerort.engine.binding import Attachment, Binding
from zerort.errors import CallError, PlanError, ZerortError
from zerort_torch.backward.gradients import gradients_of
from zerort_torch.backward.hooks import carry_over, check_hooks, hooks_of
from zerort_torch.backward.saved import SavedWeights
from zerort_torch.model.buffers import SharedBuffers
from zerort_torch.model.compiled import hook_compiled
from zerort_torch.model.finding import FoundUnit, Units, find_units
from zerort_torch.model.materialise import Init, is_meta, materialise, materialise_buffers
from zerort_torch.model.state_dict import hook_state_dict
from zerort_torch.model.support import check_supported
from zerort_torch.parameters.guard import guard_optimizers
from zerort_torch.parameters.hidden import hidden
from zerort_torch.parameters.memory import (
    as_array,
    check_device,
    check_torch,
    share_memory,
    torch_device,
)
from zerort_torch.parameters.released import ReleasedParameter, pickling_error
from zerort_torch.parameters.strays import Strays, kept_in_containers
from zerort_torch.parameters.table import TableUnit
from zerort_torch.parameters.turns import Turns, places_of
from zerort_torch.parameters.unit import TorchUnit

__all__ = ["Sharding", "shard", "sharding_of", "units_within"]

Model = TypeVar("Model", bound="torch.nn.Module")


class Sharding:
    """What a sharded model's modules and units have to do with each other."""

    def __init__(self, binding: Binding, units: list[TorchUnit]) -> None:
        self.binding = binding
        self.units = units
        self.saved = SavedWeights(binding.rt, units)
        self.handles: list[Any] = []
        """Of all hooks on the model's modules: what has ``remove()``."""
        self.attached: list[Attachment] = []
        """What the runtime asks about this model."""
        self.around: WeakKeyDictionary[Any, list[tuple[Callable[[], None], Callable[[], None]]]] = WeakKeyDictionary()
        """What is done before and after a module's forward, from the outside in."""

    def hook_forward(self, module: torch.nn.Module, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        """Have ``enter`` called before a module's forward, before what was hooked earlier, and ``leave`` after it."""
        self.handles.append(module.register_forward_pre_hook(_Hook(enter), prepend=True))
        self.handles.append(module.register_forward_hook(_Hook(leave), always_call=True))
        self.around.setdefault(module, []).insert(0, (enter, leave))


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


def unhook(model: torch.nn.Module, sharding: Sharding) -> None:
    """Take away what `shard` hung on a model. Its parameters stay as they are: released."""
    for handle in sharding.handles:
        handle.remove()
    for one in sharding.attached:
        sharding.binding.detach(one)
    for module in model.modules():
        _shardings.pop(module, None)


def shard(
    model: Model,
    rt: Runtime,
    *,
    units: Units = None,
    name: str = "",
    init: Init | None = None,
    broadcast: bool = False,
    branches: bool = False,
    lazy: bool = False,
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
        branches: Ranks use different parameters, or none, in a forward of ``model`` and its backward, and do not find
            that out by themselves: every rank takes part in the gathers of all units, and gradients are reduced after a
            backward pass, not during it. For ranks without shared memory on GPUs, with ``wire=`` for parameters,
            ``frozen_format=``, ``secondary=``, copies of the model, sparse embeddings, or `zr.Sparsity` between hosts;
            elsewhere they may differ anyway.
        lazy: Rows of ``nn.Embedding(sparse=True)`` without a gradient stay as they are, moments included, instead of
            getting what they have missed when they are next used; see `Runtime.register`.

    Returns:
        The model.

    Raises:
        CallError: It cannot be sharded, or differs between ranks; on every rank.
        PlanError: It has embeddings with ``sparse=True``, and the plan cannot gather rows; on every rank.
    """
    if not isinstance(rt, Runtime):
        raise CallError(f"Expected a runtime, as zr.open() gives one, got {type(rt).__name__}: zt.shard(model, rt).")
    gradients = gradients_of(rt)
    binding = gradients.binding
    binding.check_open("shard")
    found: list[FoundUnit] = []
    with binding.agreed("shard", catching=ZerortError):
        check_torch(rt.device)
        share_memory(rt.device)
        found = _find(model, units, device=torch_device(rt.device))
        _check_tables(binding, found, name=name, lazy=lazy)
    hook_compiled(model)
    persistent = set(model.state_dict())
    made: dict[str, TorchUnit] = {}
    originals = [(one.full, weakref.ref(one.value)) for unit in found for one in unit.parameters]
    unregistered = list(kept_in_containers(model))
    guard_optimizers((one.full, one.value) for unit in found for one in unit.parameters)
    _announce(binding, found, name=name, lazy=lazy)
    for one in found:
        made[one.name] = unit = _register(binding, one, name=name, init=init, broadcast=broadcast, lazy=lazy)
        gradients.add_unit(unit, spread=one.name == "" and len(found) > 1)
    meta_buffers = any(buffer.is_meta for buffer in model.buffers())
    materialise_buffers(model, init, device=torch_device(rt.device))
    buffers = SharedBuffers(binding, model, name=name, persistent=persistent)
    if buffers:
        binding.attach(buffers)
        if broadcast or meta_buffers:
            with binding.stream():
                buffers.send()
    for one in found:
        made[one.name].tied_owners = tuple(made[owner] for owner in sorted(one.borrows))
    ordered = [made[one.name] for one in found]
    sharding = Sharding(binding, ordered)
    if buffers:
        sharding.attached.append(buffers)
    for module in model.modules():
        _shardings[module] = sharding
    for one, unit in zip(found, ordered, strict=True):
        if isinstance(unit, TableUnit):
            sharding.handles += unit.hook()
            continue
        for holder in dict.fromkeys(one.held_by):
            sharding.hook_forward(holder, unit.acquire, unit.release)
    turns = None
    if branches and rt.size > 1 and any(unit.takes_turns for unit in ordered):
        turns = Turns(binding, dict(zip(ordered, places_of(model, found), strict=True)))
    _hook_model(model, sharding, gradients.begin_forward, turns)
    sharding.handles += hook_state_dict(rt, ordered)
    guard_optimizers((weight.full, weight.released) for unit in ordered for weight in unit.weights)
    strays = Strays(binding, model, ordered)
    for full, reference in originals:
        original = reference()
        if original is not None:
            strays.watch_object(original, full, "was before zt.shard(model, rt)")
    for full, one in unregistered:
        strays.watch_object(one, full, "holds")
    binding.attach(strays)
    sharding.attached.append(strays)
    return model


def _find(model: object, units: Units, *, device: torch.device) -> list[FoundUnit]:
    if not isinstance(model, torch.nn.Module):
        raise CallError(f"Expected a torch.nn.Module, got {type(model).__name__}.")
    check_supported(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ReleasedParameter) or model in _shardings:
            raise CallError(f"Expected a model that is not sharded yet, got one whose {name!r} is.")
        check_hooks(name, parameter)
        check_device(name, parameter.device, device)
    found = find_units(model, units)
    if not found:
        raise CallError(f"Expected a model with parameters, got {type(model).__name__} without any.")
    return found


def _check_tables(binding: Binding, found: Sequence[FoundUnit], *, name: str, lazy: bool) -> None:
    """Refuse embeddings with sparse gradients that the runtime cannot keep by rows, before anything is registered."""
    tables = [one for one in found if one.is_table]
    if lazy and not tables:
        raise CallError(
            "Expected lazy=True for a model that has a trainable nn.Embedding(sparse=True), got one without. Leave it "
            "out."
        )
    if tables and not binding.rt.device.in_host_memory:
        raise PlanError(
            "Expected embeddings with sparse=True on hosts, got a runtime on GPUs. Build them without sparse=True: "
            "they are gathered whole then."
        )
    for one in tables:
        specs = {parameter.local: _spec_of(parameter.value) for parameter in one.parameters}
        try:
            binding.check_rows(_full_name(name, one), specs, lazy=lazy)
        except ZerortError as error:
            raise type(error)(f"{error} Or build it without sparse=True: it is gathered whole then.") from None


def _spec_of(value: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _announce(binding: Binding, found: Sequence[FoundUnit], *, name: str, lazy: bool) -> None:
    """Tell the runtime of all units before the first one comes, so that a budget is shared out over all of them."""
    values = {
        _full_name(name, one): {parameter.local: parameter.value for parameter in one.parameters}
        for one in found
        if one.parameters
    }
    binding.expect(
        {full: {local: _spec_of(value) for local, value in one.items()} for full, one in values.items()},
        frozen={
            full: {local for local, value in one.items() if not value.requires_grad}.__contains__
            for full, one in values.items()
        },
        rows={_full_name(name, one): [each.local for each in one.parameters] for one in found if one.is_table},
        lazy=lazy,
    )


def _full_name(name: str, found: FoundUnit) -> str:
    return ".".join(part for part in (name, found.name) if part)


def _register(
    binding: Binding, found: FoundUnit, *, name: str, init: Init | None, broadcast: bool, lazy: bool
) -> TorchUnit:
    device = binding.rt.device
    hooks = hooks_of(found)  # before materialise, which makes new parameters
    meta = is_meta(found)
    if found.parameters:
        with binding.agreed("shard", catching=ZerortError):
            if meta:
                materialise(found, init, device=torch_device(device))
    frozen = [parameter.local for parameter in found.parameters if not parameter.value.requires_grad]
    unit = binding.register(
        _full_name(name, found) if found.parameters else found.name,
        {parameter.local: as_array(parameter.value, device) for parameter in found.parameters},
        frozen=frozen.__contains__,
        broadcast=broadcast or meta,
        rows=[parameter.local for parameter in found.parameters] if found.is_table else (),
        lazy=found.is_table and lazy,
        make=functools.partial(TableUnit if found.is_table else TorchUnit, found=found, binding=binding),
    )
    for weight, mine in zip(unit.weights, hooks, strict=True):
        carry_over(mine, to=weight.live)
    found.parameters.clear()  # and with them the memory that the model came in
    return unit


class _Hook:
    """A hook of a module: calls a function, and refuses to be pickled with the model."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    @hidden
    def __call__(self, module: torch.nn.Module, *values: object) -> None:
        self._call()

    def __deepcopy__(self, memo: object) -> _Hook:
        return self  # as a function would: the model's parameters say what is wrong

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise pickling_error("the model")


def _hook_model(model: torch.nn.Module, sharding: Sharding, begin: Callable[[], None], turns: Turns | None) -> None:
    """Put round the whole model's forward what is not any unit's business."""
    comes_and_goes = any(not unit.is_resident for unit in sharding.units)
    if comes_and_goes:
        sharding.binding.attach(sharding.saved)
        sharding.attached.append(sharding.saved)
    if turns is not None:
        sharding.binding.attach(turns)
        sharding.attached.append(turns)
        sharding.handles.append(turns)

    def enter() -> None:
        if turns is not None:
            turns.enter()
        if torch.is_grad_enabled():
            begin()
        if comes_and_goes:
            sharding.saved.enter()

    def leave() -> None:
        if comes_and_goes:
            sharding.saved.leave()
        if turns is not None:
            turns.leave()

    sharding.hook_forward(model, enter, leave)
