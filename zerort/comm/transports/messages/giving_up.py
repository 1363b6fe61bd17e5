"""What ranks on several hosts find out about each other when they give up a call together.

A rank that gives up has sounded its alarm. Here it hears who else did, so that all of them name the same missing ranks,
and writes down what is known of each rank for the error.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from zerort.comm.guard.call import Call
from zerort.comm.guard.standing import Standing
from zerort.comm.guard.verdict import Sighting, failed_error, last_call
from zerort.comm.transports.messages.exchange import Exchange

__all__ = ["agree_on_missing", "sightings"]

_HEAR_FOR = 1.0
"""Seconds in which the ranks that gave up together tell each other so."""


def agree_on_missing(exchange: Exchange, *, title: str, began: float) -> frozenset[int]:
    """Return which ranks are missing: the lowest of those who gave up says so for all.

    Args:
        exchange: Carries the alarms.
        title: What to call the group in an error.
        began: When this rank gave up, as `time.monotonic` tells it.

    Raises:
        RankFailedError: A rank has said that it failed: then nobody is missing.
    """
    rank, size = exchange.rank, exchange.size
    while True:
        exchange.listen()
        for failed in exchange.alarms.values():
            if failed.reason == "failed":
                exchange.speak_out()
                raise failed_error(title, rank=failed.rank, why=failed.last)
        if exchange.missing is not None:
            break
        here = {rank, *(other for other, alarm in exchange.alarms.items() if not alarm.is_gone)}
        waited, judges = time.monotonic() - began, min(here) == rank
        if (judges and len(exchange.alarms) == size - 1) or waited > (_HEAR_FOR if judges else 2 * _HEAR_FOR):
            exchange.judge(other for other in range(size) if other not in here)
            break
        time.sleep(1e-3)
    exchange.speak_out()
    assert exchange.missing is not None
    return exchange.missing


def sightings(
    exchange: Exchange,
    call: Call,
    missing: frozenset[int],
    *,
    last_header: Callable[[int], bytes | None],
    met_at: float,
) -> list[Sighting]:
    """Return what is known of every rank, now that a call is given up.

    Args:
        exchange: Has heard the alarms.
        call: The call that is given up.
        missing: The ranks that all have agreed are missing.
        last_header: Returns a rank's header in the call at which all last met.
        met_at: When that was, as `time.monotonic` tells it.
    """
    found = []
    for rank in range(exchange.size):
        alarm = exchange.alarms.get(rank)
        is_gone = alarm is not None and alarm.is_gone
        if not is_gone and rank not in missing:
            last = call.locate() if alarm is None else alarm.last
            found.append(Sighting(arrived=True, last=last))
            continue
        found.append(
            Sighting(
                arrived=False,
                left=is_gone,
                last=last_call(last_header(rank)),
                since=time.monotonic() - met_at,
                process=f"host {exchange.hosts[rank]}",
                farewell=Standing.read(alarm.last) if alarm is not None and alarm.reason == "left" else None,
            )
        )
    return found
