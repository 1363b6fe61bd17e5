"""The errors that ranks raise together, made from what each of them said.

Every function here takes the same facts on every rank and so returns the same text on every rank. Only text is made
here; who arrived and who did not is found out by the transports.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerort.comm.guard.call import Call, describe_header
from zerort.comm.guard.differing import RanksDiffer, Told
from zerort.comm.guard.stance import Stance
from zerort.comm.guard.standing import Standing
from zerort.errors import (
    BootstrapError,
    CallError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeviceError,
    RankFailedError,
)

__all__ = [
    "Sighting",
    "Trouble",
    "broken_error",
    "failed_error",
    "failed_trouble",
    "gone_trouble",
    "last_call",
    "late_error",
    "mismatch_error",
    "missing_error",
    "shortened",
    "tell_story",
    "why_failed",
]


_LONGEST = 600
"""Characters of one part of a story: people will not read more."""

_LONGEST_ERROR = 1000
"""Characters of an error that the other ranks are told: a text on the host ends after 4096 bytes, wherever that is."""

_STORY_NBYTES = 4000
"""Of an encoded story: what `Transport.exchange_texts` carries whole, over any transport."""

_WAIT_LONGER = "If it is only slow, raise the timeout: GroupOptions(timeout=…) or ZERORT_TIMEOUT=seconds."

_BETWEEN_STEPS = frozenset({"load", "publish", "rebalance", "resume", "save"})
"""Methods of a runtime that all ranks call, as the names of their calls begin: often, by habit, rank 0 alone does."""


def tell_story(call: Call) -> str:
    """Put a call into words that other ranks can read, short enough to reach them whole."""
    for longest in (_LONGEST, _LONGEST // 2, _LONGEST // 4, _LONGEST // 8):
        parts = {"text": call.describe(), "site": call.site, "complaint": call.complaint}
        told = {name: _short(text, longest) for name, text in parts.items()}
        stance = call.stance
        taken = None if stance is None else [_short(call.name, longest), stance.gives_way, stance.turn]
        made = {} if call.tally is None else call.tally()
        more = {"sequence": call.sequence, "stance": taken, "parts": made}
        story = json.dumps({**told, **more}, ensure_ascii=False)
        if len(story.encode()) <= _STORY_NBYTES:
            break
    return story


def mismatch_error(group: str, stories: Sequence[str]) -> CollectiveError | CallError:
    """Return the error for ranks that met with different calls, or with arguments that cannot be used."""
    told = [json.loads(story) for story in stories]  # short enough never to be cut on its way
    for rank, story in enumerate(told):
        if story["complaint"]:
            refused = CallError(f"{story['complaint']} (rank {rank} of {group}, at {story['site']})")
            refused.parts = [one["parts"] for one in told]
            return refused
    rows: dict[tuple[str, str], list[int]] = {}
    for rank, story in enumerate(told):
        rows.setdefault((story["text"], story["site"]), []).append(rank)
    lines = [f"  {_ranks(ranks)}: {text} at {site}" for (text, site), ranks in rows.items()]
    sequences = sorted({story["sequence"] for story in told})
    text = (
        f"Expected one and the same call on every rank of {group} at collective #{sequences[0]}, got:\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same calls, with the same counts, in the same order: look for a branch that only "
        "some ranks take, or a size that depends on the rank (pass counts= then)."
    )
    if all(story["stance"] is None for story in told):
        return CollectiveMismatchError(text)
    error = RanksDiffer(text)
    error.told = [_told(story["stance"]) for story in told]
    return error


def _told(stance: list[Any] | None) -> Told:
    if stance is None:
        return Told("", None)
    name, gives_way, turn = stance
    return Told(name, Stance(gives_way=gives_way, turn=turn))


@dataclass(frozen=True, slots=True)
class Sighting:
    """What is known of one rank when another stops waiting."""

    arrived: bool
    left: bool = False
    last: str = ""
    """The last call it was seen in, with its site."""
    since: float | None = None
    """Seconds since then."""
    process: str = ""
    farewell: Standing | None = None
    """What it said when it left; None for one that was killed."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What another rank is known to suffer from."""

    text: str
    in_flight_may_finish: bool
    """Whether calls that are under way may still end: a rank that has gone may have done its part of them before."""


def failed_trouble(rank: int, why: str) -> Trouble:
    """Return the trouble of a rank that failed."""
    return Trouble(f"an error on rank {rank}: {why}", in_flight_may_finish=False)


def gone_trouble(ranks: Sequence[int]) -> Trouble:
    """Return the trouble of ranks that have left or ended."""
    return Trouble(f"none of rank {', '.join(map(str, ranks))}: gone", in_flight_may_finish=True)


def last_call(header: bytes | None) -> str:
    """Say what a rank did last, from the header of that call."""
    if header is None:
        return ""
    sequence, text, site = describe_header(header)
    return f"#{sequence} {text} at {site}"


def missing_error(
    group: str, call: Call, *, waited: float, sightings: Sequence[Sighting], record: object, updates: int | None = None
) -> CollectiveError:
    """Return the error for a collective at which not every rank arrived.

    Args:
        group: What errors call the group.
        call: What this rank waits in.
        waited: Seconds after which waiting was given up.
        sightings: What is known of every rank.
        record: Where the flight record is, if it was kept.
        updates: Updates that this rank's runtime has done, if there is one.
    """
    # Who left because it missed another rank, too, was here as this one is.
    followers = [seen.farewell is not None and seen.farewell.follows for seen in sightings]
    if any(not seen.arrived and not follows for seen, follows in zip(sightings, followers, strict=True)):
        sightings = [
            replace(seen, arrived=True, left=False) if follows else seen
            for seen, follows in zip(sightings, followers, strict=True)
        ]
    missing = [rank for rank, seen in enumerate(sightings) if not seen.arrived]
    left = [rank for rank in missing if sightings[rank].left]
    lines = []
    for rank, seen in enumerate(sightings):
        if seen.arrived:
            lines.append(f"  rank {rank}: waits in {seen.last}" if seen.last else f"  rank {rank}: waits")
            continue
        where = f"last in {seen.last}" if seen.last else "has made no call since it opened the group"
        when = "" if seen.since is None else f", {seen.since:.1f} s ago"
        state = ("; it left the group or ended" if seen.left else "") + (f" ({seen.process})" if seen.process else "")
        lines.append(f"  rank {rank}: {'gone' if seen.left else 'missing'}; {where}{when}{state}")
    what = call.locate()
    if record:
        lines.append(f"Flight record: {record}")
    if left:
        head = f"Expected every rank of {group} at {what}, got none of {_ranks(left)}: gone."
        story = _story(sightings, updates, call)
        error = RankFailedError("\n".join([head, *lines, story]))
        error.story = story
        error.exit_code = max((seen.farewell.code for seen in sightings if seen.farewell is not None), default=0) or 1
        return error
    head = f"Expected every rank of {group} at {what} within {waited:.1f} s, got no {_ranks(missing)}."
    cure = f"A rank that does not arrive is stuck, busy, or took a branch without this call. {_WAIT_LONGER}"
    return CollectiveTimeoutError("\n".join([head, *lines, cure]))


def _story(sightings: Sequence[Sighting], updates: int | None, call: Call) -> str:
    """Say who left, and when, and where the others are: what a user has to know, in one line."""
    gone = {rank: seen.farewell for rank, seen in enumerate(sightings) if seen.left and not seen.arrived}
    said = {rank: standing for rank, standing in gone.items() if standing is not None}
    if len(said) < len(gone):  # killed
        return "Look at the output of the rank that left: it ended, raised or closed the group too early."
    rows: dict[str, list[int]] = {}
    for rank, standing in said.items():
        after = "" if standing.updates is None else f" after update {standing.updates}"
        code = f" with exit code {standing.code}" if standing.code else ""
        error = f" with {standing.error}" if standing.error else ""
        rows.setdefault(f"left{after}{code}{error}", []).append(rank)
    parts = [f"{_ranks(ranks)} {what}" for what, ranks in rows.items()]
    here = [rank for rank in range(len(sightings)) if rank not in gone]  # or on their way: the same text everywhere
    verb = call.name.split(" ")[0]
    if updates is not None and here:
        at = f"in {verb} at {call.site}" if verb in _BETWEEN_STEPS else f"at update {updates + 1}"
        parts.append(f"{_ranks(here)} {'is' if len(here) == 1 else 'are'} {at}")
    if any(standing.error or standing.code for standing in said.values()):
        cure = "look at the output of what left for the cause"
    elif verb in _BETWEEN_STEPS:
        cure = f"every rank must call {verb}, not rank 0 alone"
    elif updates is None or any(standing.updates is None for standing in said.values()):
        cure = "every rank must make the same calls before it closes the group or ends"
    else:
        cure = "give all ranks the same number of batches, and the same calls after them"
    return f"{', '.join(parts)}: {cure}."


def late_error(group: str, call: Call, *, rank: int, waited: float, record: object) -> CollectiveError:
    """Return the error for a rank that comes to a collective when the others have given up waiting for it."""
    head = (
        f"Expected rank {rank} of {group} at {call.locate()} within {waited:.1f} s, "
        "got it later: the others had given up waiting."
    )
    cure = f"This rank was stuck or busy before the call. {_WAIT_LONGER}"
    return CollectiveTimeoutError("\n".join([head, *([f"Flight record: {record}"] if record else []), cure]))


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def why_failed(call: Call, error: BaseException) -> str:
    """Say what a rank was doing when it raised, and what it raised."""
    return _short(f"{type(error).__name__}: {error}; in {call.locate()}")


def failed_error(group: str, *, rank: int, why: str) -> RankFailedError:
    """Return the error for a rank that raised in the middle of a collective."""
    return RankFailedError(
        f"Expected every rank of {group} to finish, got an error on rank {rank}: {why}. Nothing that was under way can "
        "be relied on. Mend the cause, then open a new group."
    )


def broken_error(op: str, group: str, cause: CollectiveError) -> CollectiveError:
    """Return the error for a call of a group that is broken. If a rank left it, all has been said: it is said again."""
    if isinstance(cause, RankFailedError) and cause.story:
        again = RankFailedError(str(cause))
        again.story, again.exit_code, again.__suppress_context__ = cause.story, cause.exit_code, True
        return again
    error = CollectiveError(f"{op}: {group} is broken since: {str(cause).splitlines()[0]} Open a new group.")
    error.__cause__ = cause
    return error


def shortened(error: BaseException) -> str:
    """Return what went wrong, short enough to be told to the other ranks of a host."""
    own = isinstance(error, (DeviceError, BootstrapError, CollectiveError))
    return (str(error) if own else f"{type(error).__name__}: {error}")[:_LONGEST_ERROR]


def _short(text: str, longest: int = _LONGEST) -> str:
    text = text.encode(errors="backslashreplace").decode()  # half a surrogate pair, as of a file's name, has no bytes
    return text if len(text) <= longest else text[: longest - 1] + "…"
