"""``zerort doctor``: run every checkup, print each finding as it comes, and tell by the exit code if one is bad.

In a job, rank 0 examines and prints; the others only take part in opening the group.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import zerort
from zerort.cli.doctor.disk import check_disk
from zerort.cli.doctor.finding import BAD, OK, WARN, Finding
from zerort.cli.doctor.gpus import check_gpus
from zerort.cli.doctor.mpi import check_mpi
from zerort.cli.doctor.shared_memory import check_shared_memory
from zerort.cli.doctor.software import check_software, group_options
from zerort.cli.screen import Screen
from zerort.comm.bootstrap.environment import launched_rank

__all__ = ["examine", "run_doctor"]

_COLOURS = {OK: "green", WARN: "yellow", BAD: "bold red"}
_TOPIC = 15


def run_doctor(directory: str, *, as_json: bool) -> int:
    """Examine this machine and a directory on its disk, print what is found, and return the exit code."""
    screen = Screen()
    findings = []
    for finding in examine(directory):
        findings.append(finding)
        if not as_json:
            _show(screen, finding)
    states = [finding.state for finding in findings]
    if launched_rank():
        return 0
    if as_json:
        document = {
            "zerort": zerort.__version__,
            "bad": states.count(BAD),
            "warn": states.count(WARN),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(document, indent=2))
    else:
        screen.print(f"{states.count(OK)} ok, {states.count(WARN)} warn, {states.count(BAD)} bad")
    return 1 if BAD in states else 0


def examine(directory: str) -> Iterator[Finding]:
    """Yield every finding, the quick ones first."""
    options = group_options()
    if launched_rank():
        yield from check_mpi(options)
        return
    yield from check_software()
    yield from check_gpus()
    yield from check_mpi(options)
    yield from check_shared_memory(options)
    yield from check_disk(directory)


def _show(screen: Screen, finding: Finding) -> None:
    from rich.text import Text

    line = Text(f"{finding.state:<5}", style=_COLOURS[finding.state])
    line.append(f"{finding.topic:<{_TOPIC}} ", style="bold")
    line.append(finding.text, style="default")
    screen.print(line)
    if finding.cure:
        screen.print(Text(f"{'':<{_TOPIC + 6}}→ {finding.cure}"))
