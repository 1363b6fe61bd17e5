"""`TorchUnit`: a unit of the runtime whose tensors stand in modules as parameters while somebody holds it.

resting   every place of a parameter has a `RestingParameter`
held      every place has the live `nn.Parameter`: one object for ever, so gradients and hooks find it

where ranks share memory, or hold all of it     the live parameter lies in the runtime's own buffer, nothing is copied
elsewhere                                       it lies in memory that torch keeps as long as anything refers to it:
the runtime's slots take turns, and autograd may need it longer

Whatever reaches the runtime does so on torch's stream: see `memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch

from zerort.buffer import unit_title
from zerort.engine import Runtime, Unit
from zerort.errors import CallError
from zerort.typing import Array
from zerort_torch.finding import FoundUnit
from zerort_torch.memory import as_array, as_tensor, on_torchs_stream
from zerort_torch.resting import RestingParameter, frozen_refusal
from zerort_torch.writes import written_refusal

__all__ = ["TorchUnit", "Weight"]


@dataclass(slots=True)
class Weight:
    """One parameter of a unit."""

    local: str
    """Its name within the unit."""
    full: str
    """Its full name in the runtime."""
    trainable: bool
    live: torch.nn.Parameter
    resting: RestingParameter
    places: list[tuple[torch.nn.Module, str]]
    section: int
    """Which of the unit's sections it lies in."""
    first: int
    """Where it begins there, in elements."""

    def put(self, value: torch.nn.Parameter) -> None:
        """Make ``value`` the parameter wherever this one stands: what somebody else has put there stays."""
        for module, attribute in self.places:
            standing = module._parameters.get(attribute)
            if standing is not self.live and standing is not self.resting:
                continue
            if type(module).__setattr__ is torch.nn.Module.__setattr__:
                module._parameters[attribute] = value  # what it comes to, without its checks
            else:
                setattr(module, attribute, value)  # an LSTM keeps a list of its weights


class TorchUnit:
    """A unit of a sharded model. Made by `zerort_torch.shard`.

    Args:
        unit: The runtime's own; None if all parameters that stand in its modules are tied to other units.
        found: What stands where; its parameters are let go by the caller.
        rt: The runtime.
    """

    def __init__(self, unit: Unit | None, found: FoundUnit, *, rt: Runtime) -> None:
        self.unit = unit
        self._rt = rt
        self._device = rt.device
        self.name = found.name if unit is None else unit.name
        self.lenders: tuple[TorchUnit, ...] = ()
        """Units that hold parameters which also stand in this one's modules."""
        self._sections = () if unit is None else unit.sections
        self.in_memory = not any(section.parameters.needs_room for section in self._sections)
        """Whether the whole unit is always where this rank can read it."""
        self._home = [as_tensor(section.parameters.whole) for section in self._sections] if self.in_memory else []
        self.weights = self._weights(found)
        self.trained = {weight.local: weight for weight in self.weights if weight.trainable}
        self._holders = 0
        self._stay = ExitStack()
        self.stays: Callable[[], bool] = lambda: False
        """Whether the gathered form must outlive its release: autograd keeps live parameters, not their memory."""
        self.flats: list[torch.Tensor] = []
        """The gathered form where it is not always there: 1-D, one per section, while somebody holds it."""
        self._versions: list[int] | None = None  # of the live parameters, when they were gathered to be read
        for weight in self.weights:
            for module, attribute in weight.places:
                setattr(module, attribute, weight.resting)

    def _weights(self, found: FoundUnit) -> list[Weight]:
        weights = []
        for parameter in found.parameters:
            assert self.unit is not None
            full = self.unit.place_of(parameter.local)[1]
            index = next(i for i, section in enumerate(self._sections) if full in section.names)
            extent = self._sections[index].layout.of(full)
            resting = RestingParameter(full, parameter.value)
            value = resting.stand_in() if not self._home else self._home[index][extent.slice].view(extent.shape)
            # .data: views of one buffer would count versions together, and a write to one look like one to all.
            resting.live = torch.nn.Parameter(value.data, requires_grad=parameter.value.requires_grad)
            weights.append(
                Weight(
                    local=parameter.local,
                    full=full,
                    trainable=parameter.value.requires_grad,
                    live=resting.live,
                    resting=resting,
                    places=parameter.places,
                    section=index,
                    first=extent.offset,
                )
            )
        return weights

    # -- holding ---------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Bring the parameters into their modules, until as many `let_go`. Collective where ranks share no memory."""
        with on_torchs_stream(self._device):
            for unit in (*self.lenders, self):
                unit._hold_own()

    def let_go(self) -> None:
        """End one `hold`.

        Raises:
            CallError: Somebody wrote to a parameter meanwhile.
        """
        written = self.release()
        if written:
            self.refuse_writes(written)

    def release(self) -> list[str]:
        """End one `hold`; return the names of parameters that somebody wrote to meanwhile."""
        with on_torchs_stream(self._device):
            return [name for unit in (self, *self.lenders) for name in unit._let_go_own()]

    def refuse_writes(self, written: list[str]) -> NoReturn:
        """Raise for parameters that were written to, and have the other ranks raise, too."""
        error = written_refusal(written)
        self._rt.complain(error)
        raise error

    def _hold_own(self) -> None:
        if self._holders == 0 and self.unit is not None:
            self._check_requires_grad()
            if self.in_memory:
                self._stay.enter_context(self.unit.gathered())
            elif not self.flats:
                self._point(self.gather())
            self._put_live()
            self._versions = [weight.live._version for weight in self.weights]
        self._holders += 1

    def _let_go_own(self) -> list[str]:
        """End one hold of this unit alone; return the names of parameters that somebody wrote to."""
        if self._holders == 0:
            return []  # its hold failed
        self._holders -= 1
        if self._holders:
            return []
        written: list[str] = []
        if self._versions is not None:
            for weight, version in zip(self.weights, self._versions, strict=True):
                if weight.live._version != version:
                    written.append(weight.full)
            self._versions = None
        for weight in self.weights:
            weight.put(weight.resting)
        self._stay.close()
        if not self.stays():
            self.end_stay()
        return written

    @property
    def is_held(self) -> bool:
        """Whether somebody holds it."""
        return self._holders > 0

    def gather(self) -> list[torch.Tensor]:
        """Return the gathered form in memory of its own, 1-D, one tensor per section. Every rank calls this."""
        assert self.unit is not None
        with on_torchs_stream(self._device), self.unit.gathered():
            return [as_tensor(section.parameters.whole).clone() for section in self._sections]

    @contextmanager
    def rewriting(self) -> Iterator[dict[str, torch.nn.Parameter]]:
        """Hold the unit for a block that may write to its parameters, on memory of this rank's own: by local name."""
        if self._holders:
            raise CallError(f"Expected {unit_title(self.name)} to rest before it is written to, got it in use.")
        self.end_stay()
        self._point(self.gather())
        self._put_live()
        self._holders += 1
        try:
            yield {weight.local: weight.live for weight in self.weights}
        finally:
            self._let_go_own()
            self.end_stay()

    def end_stay(self) -> None:
        """Let the gathered form go, if nobody holds it."""
        if not self._holders:
            self._unpoint()

    def _check_requires_grad(self) -> None:
        for weight in self.weights:
            if weight.live.requires_grad and not weight.trainable:
                weight.live.requires_grad = False  # or nobody could ever reach it again
                weight.resting.mirror_requires_grad(requires_grad=False)
                raise frozen_refusal(weight.full)

    def _put_live(self) -> None:
        for weight in self.weights:
            weight.put(weight.live)

    def _point(self, flats: list[torch.Tensor]) -> None:
        self.flats = flats
        for weight in self.weights:
            shape = weight.resting.shape
            weight.live.data = flats[weight.section][weight.first : weight.first + shape.numel()].view(shape)

    def _unpoint(self) -> None:
        if not self.flats:
            return
        self.flats = []
        for weight in self.weights:
            self.point_home(weight)

    def point_home(self, weight: Weight) -> None:
        """Have a live parameter lie where it does while the unit is released."""
        shape = weight.resting.shape
        if self._home:
            home = self._home[weight.section][weight.first : weight.first + shape.numel()]
            weight.live.data = home.view(shape)
        else:
            weight.live.data = weight.resting.stand_in()

    # -- values ----------------------------------------------------------------------------------------------------

    def assign(self, values: dict[str, Array], *, broadcast: bool) -> None:
        """Write whole tensors by local name; see `zerort.engine.Unit.assign`. Every rank calls this."""
        if self.unit is not None:
            with on_torchs_stream(self._device):
                self.unit.assign(values, broadcast=broadcast)

    def rewrite_from(self, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Array]:
        """Return what `rewriting` left behind, for `assign`."""
        with on_torchs_stream(self._device):
            return {local: as_array(parameter, self._device).copy() for local, parameter in parameters.items()}

    def mark_changed(self) -> None:
        """Tell autograd that a step wrote to the parameters: graphs that still need the old values must not run."""
        if self.in_memory and self.trained and not self._holders:  # no step changes what is held: it is refused
            torch.autograd.graph.increment_version([weight.live for weight in self.trained.values()])

    def __repr__(self) -> str:
        return f"TorchUnit({self.name!r}, {'held' if self._holders else 'resting'}, {len(self.weights)} parameters)"
