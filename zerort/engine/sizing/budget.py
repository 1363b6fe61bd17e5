"""`decide`: from what each section takes and what there is of each memory to what rests where. Integers only.

    from hot to cold    all parameters, all gradients, all state; each in the order of registration
                        behind them parameters and state of tables by rows: a batch touches little of them
                        ├───── device ─────┼───── host ─────┼───── nvme ─────┤
    beside the device's    what computing and moving values take: less, the less is below it

One list, two lines: the device gets as much of its beginning as fits beside the working memory that the rest then
needs, the host what follows (if it is apart), the disk the rest. What cannot leave the device (not sharded, updated as
whole tensors, or summed more than once) comes first. No line jumps over a large section to a small one behind it, so
more memory never moves anything down. State may be cut within a section where device and host are one: its beginning
stays there, the rest streams (decision 0034).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from zerort.config import Budget, Tier, format_bytes, parse_bytes
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.sizing.section_size import PARTS, SectionSize
from zerort.engine.sizing.working import WorkingMemory, WorkingSize
from zerort.errors import PlanError

__all__ = ["Capacity", "decide"]


class Capacity(NamedTuple):
    """Bytes that one rank may use of each memory."""

    device: int
    host: int
    nvme: int

    @classmethod
    def of(cls, budget: Budget, *, has_gpu: bool = False) -> Capacity:
        """Return what a budget means on this machine: without a GPU, device and host are one memory."""
        if has_gpu:
            return cls(budget.device, budget.host, budget.nvme)
        return cls(budget.memory, 0, budget.nvme)

    def __str__(self) -> str:
        names = ("device", "host", "nvme") if self.host else ("memory", "", "nvme")
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in zip(names, self, strict=True) if name)


def decide(
    capacity: Capacity,
    *,
    working: WorkingMemory,
    settled: Mapping[int, SectionResidence] = MappingProxyType({}),
) -> tuple[SectionResidence, ...]:
    """Say where each section's parts rest.

    Args:
        capacity: What there is.
        working: What the sections take on the rank that takes most, and computing besides.
        settled: Sections that rest somewhere already, by their number: they stay there.

    Raises:
        PlanError: It does not fit; with the numbers, and the cure.
    """
    found = _List(capacity, working, settled)
    line = found.device_line()
    below, resident = found.host_line(line)
    on_disk = found.on_disk + found.sums[-1] - found.sums[below] - (resident if below == line else 0)
    if on_disk and not capacity.host and not capacity.nvme:
        raise PlanError(found.no_memory())
    if on_disk > capacity.nvme:
        raise PlanError(_no_room(working.sizes, capacity, on_disk=on_disk))
    return found.tiers_at(line, below=below, resident=resident)


class _List:
    """All parts of all sections that are to be decided about, from hot to cold; first those that cannot leave."""

    def __init__(self, capacity: Capacity, working: WorkingMemory, settled: Mapping[int, SectionResidence]) -> None:
        self.capacity, self.working, self.settled = capacity, working, settled
        sizes = working.sizes
        items = [(at, part) for part in PARTS for at in range(len(sizes)) if at not in settled]
        items.sort(key=lambda item: sizes[item[0]].row_width > 0)  # stable
        self.items = sorted(items, key=lambda item: item[1] in sizes[item[0]].movable)
        self.pinned = sum(part not in sizes[at].movable for at, part in items)
        self.nbytes = [getattr(sizes[at], part) - sizes[at].fixed * (part == "state") for at, part in self.items]
        placed, self.on_host, self.on_disk = _placed(working, settled)
        fixed = sum(size.fixed for at, size in enumerate(sizes) if at not in settled)
        self.sums: list[int] = [*accumulate(self.nbytes, initial=placed + fixed)]
        """What the device holds if it has the first items and what is settled there; by how many items."""

    def tiers_at(self, line: int, *, below: int = 0, resident: int = 0) -> tuple[SectionResidence, ...]:
        """Return where things rest: on the device up to ``line``, in the host's memory up to ``below``."""
        tiers = [dict.fromkeys(PARTS, Tier.DEVICE) for _ in self.working.sizes]
        for number in range(line, len(self.items)):
            at, part = self.items[number]
            if self.nbytes[number]:
                tiers[at][part] = Tier.HOST if number < below else Tier.NVME
        cut = self.items[line][0] if resident else -1
        return tuple(
            self.settled[at]
            if at in self.settled
            else SectionResidence(**one, state_resident_nbytes=resident * (at == cut))
            for at, one in enumerate(tiers)
        )

    def room_at(self, line: int) -> int:
        """Return what is left of the device if it holds all up to ``line``."""
        return self.capacity.device - self.sums[line] - self.working.of(self.tiers_at(line)).nbytes

    def device_line(self) -> int:
        """Return how many items the device holds as a whole."""
        # No line needs less besides than the last one: behind what fits beside that, there is nothing to look at.
        most = self.capacity.device - self.working.of(self.tiers_at(len(self.items))).nbytes
        line = bisect_right(self.sums, most) - 1
        while line > self.pinned and self.room_at(line) < 0:
            line -= 1
        if line < self.pinned or self.room_at(line) < 0:
            raise PlanError(self.no_memory())
        return line

    def no_memory(self) -> str:
        """Say how much would be enough, in a number that can be given: more memory also means larger chunks."""
        enough = self.capacity.device
        working, at_rest = self._least(enough)
        while working.nbytes + at_rest > enough:
            enough = parse_bytes(format_bytes(working.nbytes + at_rest, up=True))
            working, at_rest = self._least(enough)
        where, more = "whatever is on the disk", "more memory"
        if not self.capacity.nvme:
            where, more = "with nothing on a disk", "more memory, or some of a disk (nvme)"
        return (
            f"Expected at least {format_bytes(enough)} of memory per rank, {where}: "
            f"gradient buckets {format_bytes(working.buckets)}, gathered units "
            f"{format_bytes(working.gathered + working.host_copy)}, "
            f"chunks on their way {format_bytes(working.streaming)}, what stays in memory {format_bytes(at_rest)}; got "
            f"{format_bytes(self.capacity.device)}. Allow {more}, cut the model into smaller units, open the "
            "runtime with fewer buckets or a smaller prefetch, or announce all units before the first is registered: "
            "rt.expect(…)."
        )

    def _least(self, device: int) -> tuple[WorkingSize, int]:
        """Return what is needed besides and at rest: with one kind of part after the other in memory, what is least."""
        changes = [at for at in range(1, len(self.items)) if self.items[at - 1][1] != self.items[at][1]]
        lines = [self.pinned, *(at for at in changes if at > self.pinned)] if self.capacity.nvme else []
        working = self.working
        if working.memory is not None:
            working = replace(working, memory=device + self.capacity.host)
        return min(
            ((working.of(self.tiers_at(line)), self.sums[line]) for line in (*lines, len(self.items))),
            key=lambda found: found[0].nbytes + found[1],
        )

    def host_line(self, line: int) -> tuple[int, int]:
        """Return how many items device and host hold, and how much of the one at ``line`` stays on the device."""
        resident = 0
        # Where the host is apart, what of a section's state does not stream is there, and so is all of it or nothing.
        if line < len(self.items) and self.items[line][1] == "state" and Tier.HOST in self.working.reach:
            resident = min(self.room_at(line), self.nbytes[line])
        below, left = line, self.capacity.host - self.on_host + resident
        while below < len(self.items) and self.nbytes[below] <= left:
            left -= self.nbytes[below]
            below += 1
        return below, resident


def _placed(working: WorkingMemory, settled: Mapping[int, SectionResidence]) -> tuple[int, int, int]:
    """Return what sections that rest somewhere already hold: on the device, on a host that is apart, on the disk."""
    device = host = disk = 0
    for at, tiers in settled.items():
        size = working.sizes[at]
        below = sum(size.on_disk(tiers, chunk_numel=working.chunk_numel).values())
        apart = sum(getattr(size, part) for part in PARTS if getattr(tiers, part) in {Tier.HOST} - working.reach)
        host += apart
        disk += below
        device += size.parameter + size.gradient + size.state - below - apart
    return device, host, disk


def _no_room(sizes: Sequence[SectionSize], capacity: Capacity, *, on_disk: int) -> str:
    parts = ", ".join(f"{part} {format_bytes(sum(getattr(size, part) for size in sizes))}" for part in PARTS)
    return (
        f"Expected the model to fit into {capacity} per rank, got {parts}, of which {format_bytes(on_disk)} are left "
        f"for nvme: {format_bytes(on_disk - capacity.nvme)} too much. Allow more of either, or start more ranks."
    )
