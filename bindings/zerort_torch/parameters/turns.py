"""`Turns`: every rank joins every gather of a model in one order, whichever parameters it uses: ``branches=True``.

forward    in the order of the modules that hold units: who reaches one joins the gathers before it, at the end the rest
backward   what an enclosing module holds, then what is inside it, from the last to the first; at its end the rest
step       a rank that made fewer rounds of forward and backward than micro-steps joins those that it lacks

What a rank does not use is gathered and let go at once, not copied. A unit that is used again, or not in this order, is
gathered by a collective of its own: all ranks do that alike, join it where they can (decision 0165), or are told of a
mismatch. Gradients are reduced when the ranks agree on them, and not among the gathers (decision 0115).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from zerort.engine.binding import Attachment, Binding
from zerort.errors import UnitStateError
from zerort_torch.backward.passes import current_pass, expect_one_end
from zerort_torch.model.compiled import original
from zerort_torch.model.finding import FoundUnit
from zerort_torch.parameters.table import TableUnit
from zerort_torch.parameters.unit import TorchUnit

__all__ = ["Turns", "places_of"]

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Where the outermost module that holds a unit stands: which child each module on the way to it is; and when it is
acquired among the units that this module holds."""


def places_of(model: torch.nn.Module, found: Sequence[FoundUnit]) -> list[list[Place]]:
    """Return where each unit is held in a forward of the model: by its own modules, and by those tied to it."""
    paths: dict[torch.nn.Module, tuple[int, ...]] = {}
    for module, path in _walk(model, ()):
        paths.setdefault(module, path)
    places: dict[str, list[Place]] = {one.name: [] for one in found}
    for at, one in enumerate(found):
        path = min(paths[holder] for holder in one.held_by)
        # A module's units are acquired from the last to the first, each after the owners of what is tied in it.
        places[one.name].append((path, (-at, 1)))
        for index, owner in enumerate(sorted(one.borrows)):
            places[owner].append((path, (-at, 0, index)))
    return list(places.values())


def _walk(module: torch.nn.Module, path: tuple[int, ...]) -> Iterator[tuple[torch.nn.Module, tuple[int, ...]]]:
    module = original(module)
    yield module, path
    for index, child in enumerate(module.children()):
        yield from _walk(child, (*path, index))


class Turns(Attachment):
    """The order in which all ranks gather a model's units.

    Args:
        binding: What torch uses of the runtime.
        places: Where each unit is held; see `places_of`. Those whose whole is always here take no part.
    """

    def __init__(self, binding: Binding, places: Mapping[TorchUnit, Sequence[Place]]) -> None:
        self._binding = binding
        self._order = binding.gradients
        self._places = {unit: min(found) for unit, found in places.items() if unit.takes_turns}
        self._forward = sorted(self._places, key=self._places.__getitem__)
        self._backward = sorted(
            (unit for unit in self._places if unit.gathers_in_backward),
            key=lambda unit: min(map(_from_the_last, places[unit])),
        )
        self._lent = [unit for unit in self._forward if len(places[unit]) > 1]  # others are tied to these
        self._depth = 0  # forwards of the model that are under way, one inside another
        self._handled: BaseException | None = None  # what the caller was handling when the forward began
        self._round: list[TorchUnit] = []  # what the last forward gathered
        self._ahead: list[TorchUnit] = []  # what of it this forward has not gathered yet
        self._behind: list[TorchUnit] | None = None  # what of it a backward pass has not gathered yet
        self._awaits_backward = False
        self._pass = -1  # number of the last backward pass
        self._rounds = 0  # since the ranks have agreed on gradients last
        self._saved: set[TorchUnit] = set()  # units of which autograd keeps something
        self._used: set[TorchUnit] = set()  # units of which it may keep nothing, and compute a segment again
        self._kept: dict[TorchUnit, list[torch.Tensor]] = {}  # in backward: what is asked for again, or later
        self._around: set[TorchUnit] = set()  # those of them that stay as long as it is the turn of what they enclose
        self._given: set[TorchUnit] = set()  # those of them that were asked for, and that autograd keeps itself since
        for unit in places:
            unit.on_backward = self._begin_backward
        for unit in self._places:
            unit.take_turn = self._take
            unit.on_saved = self._saved.add
            if isinstance(unit, TableUnit):
                unit.on_turn = self._join_before
        for unit in self._lent:
            unit.stays = self._until_end(unit.stays)
        self._order.before_agreement.append(self._complete)

    def remove(self) -> None:
        """Have gradients reduced without it: the model is no longer sharded."""
        self._order.before_agreement.remove(self._complete)

    # -- forward ---------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Begin a forward of the model; before that end the round before, if no backward pass did."""
        self._depth += 1
        if self._depth > 1 or current_pass() >= 0:
            return
        self._end_round()
        self._handled = sys.exc_info()[1]
        self._round = [unit for unit in self._forward if not unit.is_held]
        self._ahead = list(self._round)
        self._saved.clear()
        self._used.clear()

    def leave(self) -> None:
        """End one `enter`: join the gathers that are left, unless forward failed: then the other ranks are told."""
        self._depth -= 1
        if self._depth or current_pass() >= 0:
            return
        failed = sys.exc_info()[1] not in (None, self._handled)
        ahead, self._ahead, self._handled = self._ahead, [], None
        if not failed:
            _join(ahead)
        for unit in self._lent:
            if not unit.stays():
                unit.end_stay()
        self._awaits_backward = torch.is_grad_enabled() and bool(self._round) and not failed

    def _take(self, unit: TorchUnit) -> list[torch.Tensor]:
        """Gather a unit at its turn; if that has passed, out of turn."""
        if current_pass() >= 0:
            return self._take_backward(unit)
        if torch.is_grad_enabled():
            self._used.add(unit)
        self._join_before(unit)
        return unit.gather()

    def _join_before(self, unit: TorchUnit) -> None:
        """Take part in the gathers of a forward that come before a unit's turn, unless that has passed."""
        if unit in self._ahead:
            at = self._ahead.index(unit)
            before, self._ahead = self._ahead[:at], self._ahead[at + 1 :]
            for one in before:
                if one in self._lent:
                    one.keep_gathered()  # units that are tied to it come later, and find it
                else:
                    one.join_gather()

    def _until_end(self, stays: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: self._depth > 0 or stays()

    # -- backward --------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        """Note that a backward pass is under way, if it is a new one."""
        number = current_pass()
        if number == self._pass:
            return
        expect_one_end(self._binding, "branches=True", cure="`with zt.gathered(model):` instead of branches")
        self._expect_alone(number)
        self._pass = number
        if self._awaits_backward:
            self._awaits_backward, self._behind = False, self._reversed()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_round)

    def _expect_alone(self, number: int) -> None:
        """Refuse a backward pass in which another model takes turns: ranks could not tell which of them goes on."""
        others = [one for one in self._binding.attached(Turns) if one is not self]
        if any(one._pass == number and one._behind is not None for one in others):
            error = UnitStateError(
                "Expected one model with branches=True in a backward pass, got two of them. Put both into "
                "one module, and shard that: zt.shard(both, rt, branches=True); or use `with zt.gathered(model):` for "
                "each, without branches."
            )
            for one in (self, *others):
                one.forget()
            self._binding.complain(error)
            raise error

    def _take_backward(self, unit: TorchUnit) -> list[torch.Tensor]:
        self._begin_backward()
        behind = self._behind
        if unit not in self._kept and behind is not None and unit in behind:
            while unit in behind:
                flats = self._gather_next(behind, wanted=unit)
            return flats
        if unit not in self._kept:
            return unit.gather()
        if not (unit in self._saved or unit in self._lent or unit in self._around):
            self._given.add(unit)
        return self._kept[unit]

    def _gather_next(self, behind: list[TorchUnit], *, wanted: TorchUnit) -> list[torch.Tensor]:
        """Take part in the next gather of a backward pass; keep what this rank will ask for again, or later."""
        unit = behind.pop(0)
        while self._given:
            del self._kept[self._given.pop()]
        for outer in [one for one in self._around if not self._is_around(one, unit)]:
            self._around.remove(outer)
            del self._kept[outer]
        is_asked_for = unit is wanted or unit in self._saved or unit in self._used or unit in self._lent
        if not is_asked_for:
            unit.join_gather()
            return []
        flats = unit.gather()
        encloses = any(self._is_around(unit, one) for one in behind[:1])
        if encloses or unit is not wanted or unit in self._lent:
            self._kept[unit] = flats
        if encloses and unit not in self._lent:
            self._around.add(unit)
        return flats

    def _is_around(self, outer: TorchUnit, inner: TorchUnit) -> bool:
        """Say whether the module that holds one unit encloses, or is, the one that holds another."""
        path, inside = self._places[outer][0], self._places[inner][0]
        return inside[: len(path)] == path

    def _reversed(self) -> list[TorchUnit]:
        return [unit for unit in self._backward if unit in self._round]

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _end_round(self) -> None:
        """End a round whose backward is under way, or did not come; where ranks agree on each, agree."""
        is_open = self._awaits_backward or self._behind is not None
        if is_open and not self._order.agree_on_pass():
            self._finish_backward()

    def _finish_backward(self) -> None:
        behind, self._behind = self._reversed() if self._awaits_backward else self._behind, None
        self._awaits_backward = False
        self._let_go()
        if behind is not None:
            _join(behind)
            self._rounds += 1

    def _complete(self, rounds: int) -> None:
        """Join the rounds that this rank lacks before all ranks agree on gradients."""
        self._finish_backward()
        for _ in range(self._rounds, rounds):
            _join(self._forward)
            _join(self._backward)
        self._rounds = 0

    def forget(self) -> None:
        """Start the next step; see `Attachment`."""
        self._rounds, self._behind, self._awaits_backward = 0, None, False
        self._let_go()
        self._saved.clear()
        self._used.clear()

    def _let_go(self) -> None:
        self._kept.clear()
        self._around.clear()
        self._given.clear()


def _from_the_last(place: Place) -> tuple[list[int], tuple[int, ...]]:
    """Return a place as backward goes: what encloses others first, among its parts the last one."""
    path, order = place
    return [-at for at in path], order


def _join(units: Iterable[TorchUnit]) -> None:
    for unit in units:
        unit.join_gather()
