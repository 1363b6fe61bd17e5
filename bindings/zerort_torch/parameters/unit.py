"""`TorchUnit`: a unit of the runtime whose tensors stand in modules as parameters while it is gathered.

RELEASED   every place of a parameter has a `ReleasedParameter`
GATHERED   every place has the live `nn.Parameter`: one object for ever, so gradients and hooks find it

where ranks share memory, or hold all of it     the live parameter lies in the runtime's own buffer, nothing is copied
elsewhere                                       it lies in memory that torch keeps as long as anything refers to it:
the runtime's slots take turns, and autograd may need it longer

Whatever reaches the runtime does so on torch's stream: see `memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from zerort import Unit
from zerort.engine.binding import Binding, BoundUnit, unit_title
from zerort.errors import CallError, CollectiveMismatchError
from zerort.typing import Array
from zerort_torch.backward.passes import current_pass
from zerort_torch.model.finding import FoundUnit
from zerort_torch.parameters.memory import as_array, as_tensor, outside_transforms
from zerort_torch.parameters.released import ReleasedParameter, frozen_error
from zerort_torch.parameters.writes import written_error

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
    released: ReleasedParameter
    places: list[tuple[torch.nn.Module, str]]
    part: int
    """Which of the unit's parts it lies in."""
    first: int
    """Where it begins there, in elements."""

    def put(self, value: torch.nn.Parameter) -> None:
        """Make ``value`` the parameter wherever this one stands: what somebody else has put there stays."""
        for module, attribute in self.places:
            standing = module._parameters.get(attribute)
            if standing is not self.live and standing is not self.released:
                continue
            if type(module).__setattr__ is torch.nn.Module.__setattr__:
                module._parameters[attribute] = value  # what it comes to, without its checks
            else:
                setattr(module, attribute, value)  # an LSTM keeps a list of its weights


class TorchUnit(BoundUnit):
    """A unit of a sharded model. Made by `zerort_torch.shard`.

    Args:
        unit: The runtime's own; None if all parameters that stand in its modules are tied to other units.
        name: What it is called.
        around: Returns what the runtime is entered within.
        found: What stands where; its parameters are let go by the caller.
        binding: What torch uses of the runtime.
    """

    def __init__(
        self,
        unit: Unit | None,
        *,
        name: str,
        around: Callable[[], AbstractContextManager[object]],
        found: FoundUnit,
        binding: Binding,
    ) -> None:
        super().__init__(unit, name=name, around=around)
        self._binding = binding
        self._home = list(map(as_tensor, self.parts())) if self.is_resident else []
        self.weights = self._weights(found)
        self.trained = {weight.local: weight for weight in self.weights if weight.trainable}
        self._rewritten = False  # whether it was acquired to be written to
        self.stays: Callable[[], bool] = lambda: False
        """Whether the gathered form must outlive its release: autograd keeps live parameters, not their memory."""
        self.take_turn: Callable[[TorchUnit], list[torch.Tensor]] = TorchUnit.gather
        """Gathers it for a forward or a backward pass: when this rank needs it, or in one order of all (`Turns`)."""
        self.on_saved: Callable[[TorchUnit], None] = _ignore
        """Called when autograd keeps something of it."""
        self.on_backward: Callable[[], None] = _ignore
        """Called when a backward pass has a gradient of it."""
        self.flats: list[torch.Tensor] = []
        """The gathered form where it is not always there: 1-D, one per dtype, while somebody holds it."""
        self._versions: list[int] | None = None  # of the live parameters, when they were gathered to be read
        self._written: list[str] = []  # parameters that somebody wrote to before the last release
        for weight in self.weights:
            for module, attribute in weight.places:
                setattr(module, attribute, weight.released)

    def _weights(self, found: FoundUnit) -> list[Weight]:
        weights = []
        for parameter in found.parameters:
            place = self.places[parameter.local]
            released = ReleasedParameter(place.full, parameter.value)
            value = released.stand_in()
            if self._home:
                value = self._home[place.part][place.first : place.first + value.numel()].view(place.shape)
            # .data: views of one buffer would count versions together, and a write to one look like one to all.
            released.live = torch.nn.Parameter(value.data, requires_grad=parameter.value.requires_grad)
            released.unit, released.owners = self, {module for module, _ in parameter.places}
            weights.append(
                Weight(
                    local=parameter.local,
                    full=place.full,
                    trainable=parameter.value.requires_grad,
                    live=released.live,
                    released=released,
                    places=parameter.places,
                    part=place.part,
                    first=place.first,
                )
            )
        return weights

    # -- gathering -------------------------------------------------------------------------------------------------

    gathers_in_backward = True
    """Whether backward may ask for it again."""

    @property
    def takes_turns(self) -> bool:
        """Whether ranks meet when it is gathered."""
        return not self.is_resident and bool(self.places)

    def bring(self) -> None:
        """Put the live parameters into their modules; see `BoundUnit`. Collective where ranks share no memory."""
        self._check_requires_grad()
        if self._rewritten:
            self._point(self.gather())
        elif self.is_resident:
            super().bring()
        elif not self.flats:
            self._point(self.take_turn(self))
        for weight in self.weights:
            weight.put(weight.live)
        if not self._rewritten:
            self._versions = [weight.live._version for weight in self.weights]

    def drop(self) -> None:
        """Put stand-ins into the modules, and note what was written to; see `BoundUnit`."""
        if self._versions is not None:
            for weight, version in zip(self.weights, self._versions, strict=True):
                if weight.live._version != version:
                    self._written.append(weight.full)
            self._versions = None
        for weight in self.weights:
            weight.put(weight.released)
        super().drop()
        if not self.stays():
            self.end_stay()

    def release(self) -> None:
        """End one `acquire`.

        Raises:
            CallError: Somebody wrote to a parameter meanwhile.
        """
        written = self.release_noting_writes()
        if written:
            self.refuse_writes(written)

    def acquire_part(self) -> None:
        """Acquire the unit without its tied owners: for a module that owns one of its parameters, and was called alone.

        Such a module has no hook: it would cost every call inside of a block, and keep compiled blocks from sharing a
        graph. Its released parameters notice the call instead (see `released.py`).
        """
        with self._binding.stream():
            self.acquire_alone()

    def release_part(self) -> None:
        """End one `acquire_part`.

        Raises:
            CallError: Somebody wrote to a parameter meanwhile.
        """
        with self._binding.stream():
            self.release_alone()
        if self._written:
            written, self._written = self._written, []
            self.refuse_writes(written)

    def release_noting_writes(self) -> list[str]:
        """End one `acquire`; return the names of parameters that somebody wrote to meanwhile."""
        super().release()
        written = []
        for unit in (self, *self.tied_owners):
            if isinstance(unit, TorchUnit) and unit._written:
                written += unit._written
                unit._written = []
        return written

    def refuse_writes(self, written: list[str]) -> NoReturn:
        """Raise for parameters that were written to, and have the other ranks raise, too."""
        error = written_error(written)
        self._binding.complain(error)
        raise error

    def gather(self) -> list[torch.Tensor]:
        """Return the gathered form in memory of its own, 1-D, one tensor per dtype. Every rank calls this."""
        with outside_transforms(), self._naming_cures():
            return self.copy_parts(lambda part: as_tensor(part).clone(), in_backward=current_pass() >= 0)

    def join_gather(self) -> None:
        """Take part in gathering it for other ranks: nothing is copied. Every rank calls this, or `gather`."""
        with self._naming_cures():
            self.copy_parts(lambda part: None, in_backward=current_pass() >= 0)

    @contextmanager
    def _naming_cures(self) -> Iterator[None]:
        """Add to a mismatch what to do about it; the same on ranks that need the unit and on those that only join."""
        try:
            yield
        except CollectiveMismatchError as error:
            cure = "Ranks that use different parameters: zt.shard(model, rt, branches=True), or `with "
            if self.take_turn is not TorchUnit.gather:
                cure = "With branches=True ranks use units once, in the order of the modules, or `with "
            raise CollectiveMismatchError(f"{error} {cure}zt.gathered(model):`.") from error

    def keep_gathered(self) -> None:
        """Gather it now, for whoever acquires it before `end_stay`. Every rank calls this, or `gather`."""
        self._point(self.gather())

    @contextmanager
    def rewriting(self) -> Iterator[dict[str, torch.nn.Parameter]]:
        """Acquire the unit for a block that may write to its parameters, on memory of this rank's own: by local name.

        Raises:
            CallError: Somebody has acquired it.
        """
        if self.is_held:
            raise CallError(f"Expected {unit_title(self.name)} released before it is written to, got it in use.")
        self.end_stay()
        self._rewritten = True
        try:
            self.acquire_alone()
            yield {weight.local: weight.live for weight in self.weights}
        finally:
            self.release_alone()
            self._rewritten = False
            self.end_stay()

    def end_stay(self) -> None:
        """Let the gathered form go, if nobody holds it."""
        if not self.is_held:
            self._unpoint()

    def _check_requires_grad(self) -> None:
        for weight in self.weights:
            if weight.live.requires_grad and not weight.trainable:
                weight.live.requires_grad = False  # or nobody could ever reach it again
                weight.released.mirror_requires_grad(requires_grad=False)
                raise frozen_error(weight.full)

    def _point(self, flats: list[torch.Tensor]) -> None:
        self.flats = flats
        with outside_transforms():
            for weight in self.weights:
                shape = weight.released.shape
                weight.live.data = flats[weight.part][weight.first : weight.first + shape.numel()].view(shape)

    def _unpoint(self) -> None:
        if not self.flats:
            return
        self.flats = []
        with outside_transforms():
            for weight in self.weights:
                self.point_home(weight)

    def point_home(self, weight: Weight) -> None:
        """Have a live parameter lie where it does while the unit is released."""
        shape = weight.released.shape
        if self._home:
            home = self._home[weight.part][weight.first : weight.first + shape.numel()]
            weight.live.data = home.view(shape)
        else:
            weight.live.data = weight.released.stand_in()

    # -- values ----------------------------------------------------------------------------------------------------

    def rewrite_from(self, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Array]:
        """Return what `rewriting` left behind, for `assign`."""
        device = self._binding.rt.device
        with self._binding.stream():
            return {local: as_array(parameter, device).copy() for local, parameter in parameters.items()}

    # -- gradients and steps ---------------------------------------------------------------------------------------

    def handed_in(self, gradient: torch.Tensor, indices: Array | None = None) -> Any:
        """Return a gradient of autograd's as the runtime is to have it."""
        return gradient

    def on_gradients_complete(self) -> None:
        """Let go of what backward needed; see `BoundUnit`."""
        self.end_stay()

    def on_step(self) -> None:
        """Tell autograd that a step wrote to the parameters: graphs that still need the old values must not run."""
        if self.is_resident and self.trained and not self.is_held:  # no step changes what is held: it is refused
            torch.autograd.graph.increment_version([weight.live for weight in self.trained.values()])


def _ignore(*unit: TorchUnit) -> None:
    """Do nothing: nobody asked to be told."""
