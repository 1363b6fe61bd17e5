"""`Finding`: one line of the doctor: ok, warn or bad, and the cure unless it is ok."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BAD", "OK", "WARN", "Finding", "bad", "ok", "warn"]

OK, WARN, BAD = "ok", "warn", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one topic."""

    topic: str
    state: str
    """``"ok"``; ``"warn"``: works, but slower or not for long; ``"bad"``: does not work."""
    text: str
    cure: str = ""
    """What to do about it; always there unless the state is ok."""

    def __post_init__(self) -> None:
        assert (self.state == OK) == (not self.cure), f"{self.topic}: a finding has a cure unless it is ok"


def ok(topic: str, text: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(topic, OK, text)


def warn(topic: str, text: str, *, cure: str) -> Finding:
    """Return a finding of something that works, but not as well as it could."""
    return Finding(topic, WARN, text, cure)


def bad(topic: str, text: str, *, cure: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding(topic, BAD, text, cure)
