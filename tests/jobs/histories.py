"""One directory, two savers, a resumer and two readers, killed and stopped at random: is what they saw possible?

    python tests/jobs/histories.py DIRECTORY SEED [SAVES]

Every process writes down when it began and ended what. Afterwards the history is checked as that of one register: a
read returns what some save wrote; none that another save had replaced before the read began; and nothing that returned
is lost. Who was refused was told the number of a process that was there. Prints the counts; exits with 1 and the
violations if there are any, or if too little happened. Its processes end with it.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np

import zerort as zr
from zerort.checkpoint import Value, load, save, verify
from zerort.checkpoint.files.lease import Lease
from zerort.errors import CheckpointError, CheckpointInUseError
from zerort.layout import FlatLayout, Partition

LAYOUT = FlatLayout.build({"w": (5120,), "b": (64,)})
PARTITION = Partition.build(LAYOUT.numel, 1)
PR_SET_PDEATHSIG = 1  # of Linux's prctl
LONGEST = 90.0
"""Seconds, after which a run is over in any case."""


class Diary:
    """What one process did, in a file that outlives it: one line per event, written at once."""

    def __init__(self, path: Path, who: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._who = f"{who}-{os.getpid()}"

    def note(self, what: str, **facts: object) -> None:
        event = {"who": self._who, "pid": os.getpid(), "what": what, "at": time.monotonic_ns(), **facts}
        os.write(self._file, json.dumps(event).encode() + b"\n")


def value_of(stamp: int) -> Value:
    mine = np.full(LAYOUT.numel, stamp, np.float32)
    return Value(kind="parameter", layout=LAYOUT, partition=PARTITION, mine=mine)


def saver(path: Path, diary: Diary, stamps: list[int], *, keeps_lease: bool, resumes: bool) -> None:
    """Save for ever: each time anew, or as one who holds on to the directory for some saves, as `last_step` does."""
    with zr.open_group(kind="solo") as group:
        while stamps:
            lease = Lease(str(path)) if keeps_lease else None
            try:
                if lease is not None:
                    lease.hold()
                if resumes:
                    read(path, diary, group)
                for _ in range(5 if keeps_lease else 1):
                    stamp = stamps.pop()
                    diary.note("saves", stamp=stamp)
                    save(path, group, [value_of(stamp)], meta={"stamp": stamp}, lease=lease)
                    diary.note("saved", stamp=stamp)
            except CheckpointInUseError as error:
                diary.note("told", text=str(error))
                time.sleep(0.005)
            finally:
                if lease is not None:
                    lease.release()


def read(path: Path, diary: Diary, group: zr.Group) -> None:
    diary.note("reads")
    mine = value_of(-1)
    manifest = load(path, group, [mine])
    stamp = manifest.meta["stamp"]
    wrong = int((mine.array != stamp).sum())
    diary.note("read", stamp=stamp, wrong=wrong)


def reader(path: Path, diary: Diary, stamps: list[int]) -> None:
    with zr.open_group(kind="solo") as group:
        while True:
            read(path, diary, group)
            damages = verify(path)
            if damages:
                diary.note("damage", text=str(damages[0]))


ROLES = {
    "saver": lambda *given: saver(*given, keeps_lease=False, resumes=False),
    "keeper": lambda *given: saver(*given, keeps_lease=True, resumes=False),
    "resumer": lambda *given: saver(*given, keeps_lease=True, resumes=True),
    "reader": reader,
    "other reader": reader,
}


def start(role: str, path: Path, log: Path, stamps: list[int]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # which ends those that are stopped, too
    if os.getppid() != parent:
        os._exit(1)
    code = 1
    try:
        diary = Diary(log, role)
        diary.note("begins")
        ROLES[role](path, diary, stamps)
        code = 0
    except CheckpointError as error:
        diary.note("damage", text=f"{type(error).__name__}: {error}")
    except BaseException:
        diary.note("failed", text=traceback.format_exc())
    finally:
        os._exit(code)


def disturb(path: Path, log: Path, *, seed: int, saves: int) -> dict[str, int]:
    """Let all of them run, and kill and stop them, until there are enough saves."""
    chance = random.Random(seed)
    numbers = iter(range(1, 10**6))
    counts: dict[str, int] = collections.Counter()

    def begin(role: str) -> int:
        first = next(numbers) * 1000
        return start(role, path, log, list(range(first + 999, first, -1)))

    workers = {role: begin(role) for role in ROLES}
    stopped: dict[str, float] = {}
    until = time.monotonic() + LONGEST
    try:
        while time.monotonic() < until and log.read_text().count('"saved"') < saves:
            time.sleep(chance.uniform(0.01, 0.05))
            role = chance.choice(sorted(set(ROLES) - set(stopped)) or sorted(ROLES))
            for other in [one for one, when in stopped.items() if when < time.monotonic()]:
                os.kill(workers[other], signal.SIGCONT)
                del stopped[other]
            if chance.random() < 0.3:
                os.kill(workers[role], signal.SIGKILL)
                counts["kills"] += 1
            elif chance.random() < 0.3 and len(stopped) < 2:
                os.kill(workers[role], signal.SIGSTOP)
                stopped[role] = time.monotonic() + chance.uniform(0.05, 0.4)
                counts["stops"] += 1
            for one, worker in workers.items():
                if os.waitpid(worker, os.WNOHANG)[0]:
                    stopped.pop(one, None)
                    workers[one] = begin(one)
    finally:
        for worker in workers.values():
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    return counts


def violations(events: list[dict[str, object]]) -> list[str]:
    """Return what cannot have been, if there was one register that whole saves were written to."""
    found = [f"{one['who']}: {one['text']}" for one in events if one["what"] in ("damage", "failed")]
    begun = {one["stamp"]: one["at"] for one in events if one["what"] == "saves"}
    ended = {one["stamp"]: one["at"] for one in events if one["what"] == "saved"}
    pids = {one["pid"] for one in events}
    for one in events:
        if one["what"] == "told":
            named = re.search(r"got process (\d+) on", str(one["text"]))
            if named is None or int(named[1]) not in pids:
                found.append(f"{one['who']} was told of nobody: {one['text']}")
    began: dict[object, int] = {}
    for one in events:
        if one["what"] == "reads":
            began[one["who"]] = one["at"]
        if one["what"] != "read":
            continue
        stamp, first = one["stamp"], began[one["who"]]
        if one["wrong"]:
            found.append(f"{one['who']} read {one['wrong']} values that were not saved with {stamp}")
        if stamp not in begun:
            found.append(f"{one['who']} read {stamp}, which nobody saved")
            continue
        replaced = [
            other
            for other, at in ended.items()
            if at < first and begun[other] > ended.get(stamp, float("inf")) and other != stamp
        ]
        if replaced:
            found.append(f"{one['who']} read {stamp} after {replaced[:3]} had replaced it")
    return found


def main(directory: str, seed: int, saves: int) -> int:
    path, log = Path(directory) / "c", Path(directory) / "log"
    path.parent.mkdir(parents=True, exist_ok=True)
    diary = Diary(log, "first")
    with zr.open_group(kind="solo") as group:
        diary.note("saves", stamp=0)
        save(path, group, [value_of(0)], meta={"stamp": 0})
        diary.note("saved", stamp=0)
    counts = disturb(path, log, seed=seed, saves=saves)
    with zr.open_group(kind="solo") as group:
        read(path, diary, group)
        diary.note("saves", stamp=999)
        save(path, group, [value_of(999)], meta={"stamp": 999})
        diary.note("saved", stamp=999)
        read(path, diary, group)
    events = sorted(map(json.loads, log.read_text().splitlines()), key=lambda one: one["at"])
    counts.update(collections.Counter(one["what"] for one in events if one["what"] in ("saved", "read", "told")))
    left = sorted(os.listdir(path))
    wrong = violations(events)
    if len(left) != 2:
        wrong.append(f"left behind: {left}")
    if counts["saved"] <= saves or counts["read"] <= 2 or not counts["kills"]:  # two of each are this process's
        wrong.append(f"too little happened in {LONGEST:.0f} s for {saves} saves")
    print(f"seed {seed}: {json.dumps(counts)}, {len(wrong)} violations")
    print(*wrong[:10], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 100))
