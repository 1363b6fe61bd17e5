"""The errors that ranks raise together, made from what each of them said.

Every function here takes the same facts on every rank and so returns the same text on every rank. Only text is made
here; who arrived and who did not is found out by the transports. May import: errors, comm.call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from zerort.comm.call import Call, describe_header
from zerort.errors import CallError, CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, RankFailedError

__all__ = [
    "Sighting",
    "Trouble",
    "failed_error",
    "failed_trouble",
    "gone_trouble",
    "last_call",
    "late_error",
    "mismatch_error",
    "missing_error",
    "tell_story",
    "why_failed",
]


_LONGEST = 600
"""Characters of one part of a story: a story must reach the others whole, and people will not read more."""

_WAIT_LONGER = "If it is only slow, raise the timeout: GroupOptions(timeout=…) or ZERORT_TIMEOUT=seconds."


def tell_story(call: Call) -> str:
    """Put a call into words that other ranks can read."""
    return json.dumps(
        {
            "text": _short(call.describe()),
            "site": _short(call.site),
            "complaint": _short(call.complaint),
            "sequence": call.sequence,
        }
    )


def mismatch_error(group: str, stories: Sequence[str]) -> CollectiveError | CallError:
    """Return the error for ranks that met with different calls, or with arguments that cannot be used."""
    told = [json.loads(story) for story in stories]  # short enough never to be cut on its way
    for rank, story in enumerate(told):
        if story["complaint"]:
            return CallError(f"{story['complaint']} (rank {rank} of {group}, at {story['site']})")
    rows: dict[tuple[str, str], list[int]] = {}
    for rank, story in enumerate(told):
        rows.setdefault((story["text"], story["site"]), []).append(rank)
    lines = [f"  {_ranks(ranks)}: {text} at {site}" for (text, site), ranks in rows.items()]
    sequences = sorted({story["sequence"] for story in told})
    return CollectiveMismatchError(
        f"Expected one and the same call on every rank of {group} at collective #{sequences[0]}, got:\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same calls, with the same counts, in the same order: look for a branch that only "
        "some ranks take, or a size that depends on the rank (pass counts= then)."
    )


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


@dataclass(frozen=True, slots=True)
class Trouble:
    """What another rank is known to suffer from."""

    text: str
    may_end: bool
    """Whether calls that are under way may still end: a rank that has gone may have done its part of them before."""


def failed_trouble(rank: int, why: str) -> Trouble:
    """Return the trouble of a rank that failed."""
    return Trouble(f"an error on rank {rank}: {why}", may_end=False)


def gone_trouble(ranks: Sequence[int]) -> Trouble:
    """Return the trouble of ranks that have left or ended."""
    return Trouble(f"none of rank {', '.join(map(str, ranks))}: gone", may_end=True)


def last_call(header: bytes | None) -> str:
    """Say what a rank did last, from the header of that call."""
    if header is None:
        return ""
    sequence, text, site = describe_header(header)
    return f"#{sequence} {text} at {site}"


def missing_error(
    group: str, call: Call, *, waited: float, sightings: Sequence[Sighting], record: object
) -> CollectiveError:
    """Return the error for a collective at which not every rank arrived."""
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
    what = f"#{call.sequence} {call.describe()} at {call.site}"
    if left:
        error: type[CollectiveError] = RankFailedError
        head = f"Expected every rank of {group} at {what}, got none of {_ranks(left)}: gone."
        cure = "Look at the output of the rank that left: it ended, raised or closed the group too early."
    else:
        error = CollectiveTimeoutError
        head = f"Expected every rank of {group} at {what} within {waited:.1f} s, got no {_ranks(missing)}."
        cure = f"A rank that does not arrive is stuck, busy, or took a branch without this call. {_WAIT_LONGER}"
    tail = [f"Flight record: {record}"] if record else []
    return error("\n".join([head, *lines, cure, *tail]))


def late_error(group: str, call: Call, *, rank: int, waited: float, record: object) -> CollectiveError:
    """Return the error for a rank that comes to a collective when the others have given up waiting for it."""
    lines = [
        f"Expected rank {rank} of {group} at #{call.sequence} {call.describe()} at {call.site} within {waited:.1f} s, "
        "got it later: the others had given up waiting.",
        f"This rank was stuck or busy before the call. {_WAIT_LONGER}",
    ]
    return CollectiveTimeoutError("\n".join([*lines, *([f"Flight record: {record}"] if record else [])]))


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def why_failed(call: Call, error: BaseException) -> str:
    """Say what a rank was doing when it raised, and what it raised."""
    return _short(f"{type(error).__name__}: {error}; in #{call.sequence} {call.describe()} at {call.site}")


def failed_error(group: str, *, rank: int, why: str) -> RankFailedError:
    """Return the error for a rank that raised in the middle of a collective."""
    return RankFailedError(
        f"Expected every rank of {group} to finish, got an error on rank {rank}: {why}. Nothing that was under way can "
        "be relied on. Mend the cause, then open a new group."
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
