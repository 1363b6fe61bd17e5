"""`decide`: which shards and shares are worth having, from what all ranks have measured. Pure: the same on every rank.

a rank's step      = seconds of the whole batch here × its share  +  seconds of the whole update here × its shard
a step             = that of the slowest rank

shares             cost nothing to change: as even as the measured speeds allow
shards             cost a move: made if it saves more than it costs within ``payback_steps``
both               stay as they are unless a step gets shorter by 5 %, and by more than the times vary
a full memory      its ranks give away a part of their shards, whatever that costs, once in 8 steps (decision 0136)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zerort.config import format_bytes
from zerort.engine.rebalance.moving import moved_numel
from zerort.layout import Partition

__all__ = ["LEAST_STEPS", "Decision", "Measured", "Place", "Situation", "decide"]

LEAST_STEPS: Final = 8
"""Steps that have to be measured since the last change."""
_WORTH: Final = 0.05
"""The part of a step that a change has to save."""
_ODDS: Final = 1000
"""In how many calls one may take noise for a difference."""
_SHORT: Final = 0.05
"""A memory is short if it has less than this part of the shards that lie in it left."""
_KEPT: Final = 0.15
"""The part that stays free when shards grow, and that a short memory gets: more than `_SHORT`, so that no shard goes to
and fro."""
_PARTS: Final = (1.0, 0.75, 0.5, 0.25, 0.1)
"""How much of a wanted change is tried, where memory does not allow all of it."""
_CUTS: Final = 1 << 16
"""Elements of the partitions by which it is estimated how much of a model changes its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank has measured since the last change."""

    steps: int
    """In how many steps."""
    compute: float
    """Seconds of its own in a step without the update, the median."""
    update: float
    """Seconds of its own in an update, the median."""
    error: float = 0.0
    """The standard error of `compute`, as a part of it."""
    samples: float = 0.0
    """Samples of orders that it took in a step, the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A memory that holds shards of some ranks: of a GPU, a host, a process, a disk."""

    name: str
    """What to call it."""
    ranks: tuple[int, ...]
    """Whose shards lie there."""
    free: int
    """Bytes that it has left."""
    whole: int
    """Bytes that a rank's part takes there if it has all of the model."""
    largest: int = 0
    """The same of the largest section: what is made anew stands beside what was there, a section at a time."""
    keeps_old: bool = False
    """Whether all that was there stays beside what is made anew: files of the last step that was kept."""

    def held(self, shards: Sequence[float]) -> float:
        """Return the bytes that shards take here."""
        return self.whole * sum(shards[rank % len(shards)] for rank in self.ranks)

    def is_short(self, shards: Sequence[float]) -> bool:
        """Say whether there is hardly anything left."""
        return self.free < _SHORT * self.held(shards)

    def allows(self, now: Sequence[float], wanted: Sequence[float]) -> bool:
        """Say whether other shards find room here, and leave some."""
        growth = self.held(wanted) - self.held(now)
        beside = self.largest * sum(wanted[rank % len(wanted)] for rank in self.ranks)
        needed = self.held(wanted) if self.keeps_old else max(growth, 0) + beside
        return needed <= self.free - (_KEPT * self.held(now) if growth > 0 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything that a decision depends on; the same on every rank."""

    ranks: tuple[Measured, ...]
    """All ranks."""
    shares: tuple[float, ...]
    """How much of a batch each takes now; they sum to 1."""
    shards: tuple[float, ...]
    """How much of the model each rank of a copy has now; they sum to 1."""
    fixed_shares: str = ""
    """Why shares cannot change; empty if they can."""
    fixed_shards: str = ""
    """Why shards cannot change; empty if they can."""
    places: tuple[Place, ...] = ()
    """The memories."""
    nbytes: int = 0
    """Bytes that move if all of the model changes its rank."""
    bytes_per_second: float = 1e9
    """How fast they do."""
    payback_steps: int = 100
    """Within how many steps a move has to save what it costs."""
    since_relief: int | None = None
    """Updates since a full memory last gave shards away; None: none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why."""

    shares: tuple[float, ...] | None = None
    """How much of a batch each rank is to take; None: as now."""
    shards: tuple[float, ...] | None = None
    """How much of the model each rank of a copy is to have; None: as now."""
    seconds_now: float = 0.0
    """Seconds of a step as things are, by what was measured."""
    seconds_then: float = 0.0
    """Seconds of a step then."""
    relieves: bool = False
    """Whether shards move because a memory is full."""
    why: str
    """In words."""


def decide(now: Situation) -> Decision:
    """Return which shares and shards are worth having."""
    model = _Model(now)
    # What was given away may come back late, or stay with an allocator: the same shortage is not answered twice.
    relief = _relief(now) if now.since_relief is None or now.since_relief >= LEAST_STEPS else None
    measured = min(one.steps for one in now.ranks)
    if measured < LEAST_STEPS and relief is None:
        few = f"{measured} steps were measured since the last change, {LEAST_STEPS} are needed"
        return Decision(why=f"kept: {few}{_phrases(_shortage(now))}")
    before = model.seconds(now.shares, now.shards)
    # The slowest of many ranks is so many standard errors too slow by chance, about once in _ODDS calls. Those of ranks
    # that take little time themselves, though they may vary a lot, do not matter as much.
    errors = math.sqrt(2 * math.log(_ODDS * len(now.ranks)))
    margin = max(_WORTH, errors * max(one.error * one.compute for one in now.ranks) / max(before, 1e-12))
    shards, reason = relief or (now.shards, "")
    shares = model.best_shares(shards) if measured >= LEAST_STEPS else now.shares
    rejected = ""
    if relief is not None and model.seconds(shares, shards) > (1 - margin) * model.seconds(now.shares, shards):
        shares = now.shares
    elif relief is None and not now.fixed_shards:
        shards, shares, reason, rejected = _best_move(now, model, shares, margin=margin)
    after = model.seconds(shares, shards)
    if relief is None and before - after < margin * before:
        saved = f"a step would take {after:.3g} s instead of {before:.3g} s, and has to gain {margin:.0%}"
        fixed = _phrases(now.fixed_shares and f"shares stay, {now.fixed_shares}", rejected, _shortage(now))
        return Decision(seconds_now=before, seconds_then=before, why=f"kept: {saved}{fixed}")
    moves, deals = shards != now.shards, shares != now.shares
    slow = max(range(len(now.ranks)), key=lambda rank: model.rank_seconds(rank, now.shares, now.shards))
    others = [model.rank_seconds(rank, now.shares, now.shards) for rank in range(len(now.ranks)) if rank != slow]
    own = model.rank_seconds(slow, now.shares, now.shards)
    mean = math.fsum(others) / max(len(others), 1)
    waits = f"rank {slow} takes {own:.3g} s of a step, the others {mean:.3g} s" if before > after else ""
    return Decision(
        shares=shares if deals else None,
        shards=shards if moves else None,
        seconds_now=before,
        seconds_then=after,
        relieves=relief is not None,
        why="; ".join(filter(None, [reason, waits])) + _phrases(rejected),
    )


def _shortage(now: Situation) -> str:
    """Return which memory is short though nothing relieves it, and why; empty if none is."""
    short = next((place for place in now.places if place.is_short(now.shards)), None)
    if short is None:
        return ""
    if now.since_relief is not None and now.since_relief < LEAST_STEPS:
        why = f"gave shards away {now.since_relief} updates ago"
    else:
        why = now.fixed_shards or "no other shards find room"
    return f"{short.name} has {format_bytes(short.free)} left: {why}"


def _phrases(*texts: str) -> str:
    return "".join(f"; {text}" for text in texts if text)


class _Model:
    """How long a step takes, by what the ranks have measured."""

    def __init__(self, now: Situation) -> None:
        self._now = now
        total = math.fsum(one.samples for one in now.ranks)
        self._least = 1.5 / total if total else 0.0  # a sample, however bounds are rounded: its speed stays measured
        self._fixed = [0.0 if self._deals(one) else one.compute for one in now.ranks]
        self._batch = [one.compute * total / one.samples if self._deals(one) else 0.0 for one in now.ranks]
        known = [one.update / self._shard(at) for at, one in enumerate(now.ranks) if self._shard(at) > 0]
        usual = sorted(known)[len(known) // 2]
        self.update = [
            one.update / self._shard(at) if self._shard(at) > 0 else usual for at, one in enumerate(now.ranks)
        ]
        """Seconds that each rank would take to update all of the model."""

    def _deals(self, one: Measured) -> bool:
        """Say whether a rank's time follows from its share: it takes samples, and may take others."""
        return not self._now.fixed_shares and one.samples > 0

    def _shard(self, rank: int) -> float:
        return self._now.shards[rank % len(self._now.shards)]

    def rank_seconds(self, rank: int, shares: Sequence[float], shards: Sequence[float]) -> float:
        """Return what one rank takes for its part of a step."""
        update = self.update[rank] * shards[rank % len(shards)]
        return self._fixed[rank] + self._batch[rank] * shares[rank] + update

    def seconds(self, shares: Sequence[float], shards: Sequence[float]) -> float:
        """Return what the slowest rank takes."""
        return max(self.rank_seconds(rank, shares, shards) for rank in range(len(shares)))

    def best_shares(self, shards: Sequence[float]) -> tuple[float, ...]:
        """Return the shares with which all ranks take equally long, as far as those that deal can reach that."""
        dealing = [rank for rank, seconds in enumerate(self._batch) if seconds > 0]
        if len(dealing) < 2:
            return self._now.shares
        costs = [self._batch[rank] for rank in dealing]
        begun = [self.update[rank] * shards[rank % len(shards)] for rank in dealing]
        wanted = math.fsum(self._now.shares[rank] for rank in dealing)
        least = min(self._least, wanted / len(dealing))
        filled = _fill(costs, begun, total=wanted, least=least)
        found = list(self._now.shares)
        for rank, share in zip(dealing, filled, strict=True):
            found[rank] = max(round(share, 4), least)
        return tuple(found)

    def best_shards(self, shares: Sequence[float]) -> tuple[float, ...]:
        """Return the shards with which all ranks take equally long, given their shares of a batch."""
        size = len(self._now.shards)
        slowest = [
            max(range(place, len(shares), size), key=lambda rank: self.rank_seconds(rank, shares, self._now.shards))
            for place in range(size)
        ]
        costs = [max(self.update[rank], 1e-12) for rank in slowest]
        begun = [self.rank_seconds(rank, shares, [0.0] * size) for rank in slowest]
        return tuple(round(one, 4) for one in _fill(costs, begun, total=1.0, least=0.0))


def _fill(costs: Sequence[float], begun: Sequence[float], *, total: float, least: float) -> list[float]:
    """Share out ``total`` so that ``begun + cost × share`` is the same everywhere, or where it is more, ``least``.

    Like water: ranks that have the most to do already stay dry (but for ``least``), all others end at one level.
    """
    wet = list(range(len(costs)))
    while True:
        rest = total - least * (len(costs) - len(wet))
        level = (rest + math.fsum(begun[at] / costs[at] for at in wet)) / math.fsum(1 / costs[at] for at in wet)
        dry = [at for at in wet if (level - begun[at]) / costs[at] < least]
        if not dry or len(dry) == len(wet):
            break
        wet = [at for at in wet if at not in dry]
    return [(level - begun[at]) / costs[at] if at in wet else least for at in range(len(costs))]


def _best_move(
    now: Situation, model: _Model, shares: tuple[float, ...], *, margin: float
) -> tuple[tuple[float, ...], tuple[float, ...], str, str]:
    """Return the shards that pay, the best shares with them, why, and what was rejected; those of now if none does."""
    stay = model.seconds(shares, now.shards)
    size = len(now.shards)
    if max(model.update) < _WORTH * stay:  # whoever did all of it, it would not matter
        return now.shards, shares, "", ""
    speeds = [1 / max(max(model.update[rank] for rank in range(at, len(shares), size)), 1e-12) for at in range(size)]
    wanted = {
        "shards follow the speed of updates": tuple(round(one / math.fsum(speeds), 4) for one in speeds),
        "shards relieve who computes longest": model.best_shards(shares),
        "shards are alike again": (1 / size,) * size,
    }
    best, rejected = (stay * now.payback_steps, now.shards, shares, ""), ""
    for reason, asked in wanted.items():
        shards = _within(now, asked)
        then = model.best_shares(shards)
        seconds, nbytes = model.seconds(then, shards), _moved(now, shards)
        cost = nbytes / now.bytes_per_second
        total = seconds * now.payback_steps + cost
        if stay - seconds < margin * stay or shards == now.shards:
            continue
        if total < best[0]:
            best = total, shards, then, f"{reason}, which moves {format_bytes(nbytes)}"
        elif total >= stay * now.payback_steps:
            rejected = (
                f"{format_bytes(nbytes)} of shards stay where they are: a move of {cost:.3g} s would save "
                f"{stay - seconds:.3g} s in each of {now.payback_steps} steps"
            )
    return best[1], best[2], best[3], "" if best[3] else rejected


def _moved(now: Situation, shards: Sequence[float]) -> int:
    """Return how many bytes other shards would move, about."""
    before, after = (Partition.build(_CUTS, len(shards), weights=one) for one in (now.shards, shards))
    return now.nbytes * moved_numel(before, after) // _CUTS


def _within(now: Situation, wanted: Sequence[float]) -> tuple[float, ...]:
    """Return as much of a change of shards as every memory allows; the shards of now if that is nothing."""
    for part in _PARTS:
        shards = tuple(old + part * (new - old) for old, new in zip(now.shards, wanted, strict=True))
        if all(place.allows(now.shards, shards) for place in now.places):
            return shards
    return now.shards


def _relief(now: Situation) -> tuple[tuple[float, ...], str] | None:
    """Return shards that leave some room in a memory that is short, and why; None: none is, or nobody else has room."""
    short = [place for place in now.places if place.is_short(now.shards)]
    if not short or now.fixed_shards:
        return None
    size = len(now.shards)
    full = {rank % size for place in short for rank in place.ranks}
    given = math.fsum(now.shards[at] * _KEPT for at in full)
    taking = math.fsum(now.shards[at] for at in range(size) if at not in full)
    if not taking:
        return None
    wanted = [one * (1 - _KEPT) if at in full else one + given * one / taking for at, one in enumerate(now.shards)]
    shards = _within(now, wanted)
    if shards == now.shards:
        return None
    return shards, f"{short[0].name} has {format_bytes(short[0].free)} left"
