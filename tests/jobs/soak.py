"""Many steps on four ranks, with kills and stops: no step is lost, and nothing grows.

    python tests/jobs/soak.py DIRECTORY SEED STEPS

Parameters, gradients and state rest on the disk, and every step is kept (`last_step`). One run is left alone, on
a disk in memory. Another in DIRECTORY lives about 50 steps at a time: a rank is killed, then the job is started again
and resumes; now and then a rank is stopped for a moment. Both must end with the same parameters and
state, bit for bit (`violations` has the rest). Ranks note after their steps what they hold, for `growth`.

Prints the counts; exits with 1 and what is wrong, if anything is.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import zerort as zr
from zerort.checkpoint import read_manifest, verify
from zerort.comm.bootstrap.leftovers import sees_every_process
from zerort.engine.step.step import digest_of
from zerort.testing import JobResult, run_job

RANKS = 4
LIFE = (5, 95)
"""Steps, between which a life's length is drawn. One life in eight is killed while it opens, registers or resumes."""
BURST = (0.02, 0.3)
"""Seconds for which a rank is stopped; the others wait a hundred times longer."""
TIMEOUT = 30.0
SAMPLE = 10
"""Steps from one look at what a rank holds to the next."""
SWEPT = 61.0
"""Seconds; MPI's shared memory of a killed job is swept by the next one that opens after a minute."""

Event = dict[str, Any]


class Diary:
    """What ranks did, in a file that outlives them: one line per event, written at once."""

    def __init__(self, directory: Path, life: int) -> None:
        self._file = os.open(directory / "diary", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._life = life

    def note(self, what: str, **facts: object) -> None:
        os.write(self._file, json.dumps({"what": what, "life": self._life, **facts}).encode() + b"\n")


def read_diary(directory: Path, first: int = 0) -> tuple[list[Event], int]:
    """Return what was noted from a byte of the diary on, and the byte after it."""
    with open(directory / "diary", "rb") as file:
        file.seek(first)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]  # a line may be under way
    return [json.loads(line) for line in whole.splitlines()], first + len(whole)


def train(directory: Path, life: int, steps: int) -> None:
    """Be one rank of one life."""
    diary = Diary(directory, life)
    diary.note("starts", pid=os.getpid())
    nvme = zr.Tier.NVME
    warnings.filterwarnings("ignore", "Expected a disk for what rests on NVME")  # the run that is left alone
    with zr.open(
        plan=zr.Plan.zero(3, parameter=nvme, gradient=nvme, state=nvme),
        optimizer=zr.AdamW(lr=0.01),
        group=zr.open_group(options=zr.GroupOptions.from_environment(timeout=TIMEOUT)),
        scratch=str(directory / "scratch"),
        create_scratch=True,
        offload=zr.OffloadOptions(chunk_nbytes=8192, threads=2),
        last_step=str(directory / "last"),
    ) as rt:
        unit = rt.register("unit", {"w": np.linspace(-1, 1, 6000)})  # float64: 12,000 bytes of each value per rank
        restored = rt.resume()
        progress = None if restored is None else restored.progress
        diary.note("begins", rank=rt.rank, pid=os.getpid(), update=rt.updates, progress=progress, segments=segments())
        for number in range(rt.updates, steps):
            with unit.gathered() as values:
                gradient = values["w"] - np.cos(np.arange(6000) + number * (rt.rank + 1))
                checksum = zlib.crc32(values["w"])
            unit.reduce({"w": gradient})
            rt.step(progress=[rt.rank, number + 1])
            held = holdings(directory, rt.rank) if rt.updates % SAMPLE == 0 else {}
            diary.note("returned", rank=rt.rank, update=rt.updates, began_with=checksum, **held)
        diary.note("ends", rank=rt.rank, digest=digest_of(rt.context, rt.units))


def segments() -> list[str]:
    """Return the files in shared memory that this process has mapped, and that have a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    named = {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return sorted(one for one in named if not one.endswith(" (deleted)"))


def holdings(directory: Path, rank: int) -> dict[str, int]:
    """Return what this process holds; rank 0 looks at what is common, too."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = {
        "rss": pages * os.sysconf("SC_PAGESIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
    if rank == 0:
        held["scratch"] = sum(len(files) + len(inner) for _, inner, files in os.walk(directory / "scratch"))
        held["last step"] = len(os.listdir(directory / "last"))
    return held


class Life:
    """One job, from its start until all of its ranks are gone."""

    def __init__(self, directory: Path, number: int, steps: int, *, shm: str, limit: float) -> None:
        self.pids: dict[str, list[int]] = {"starts": [], "begins": []}
        self.segments: set[str] = set()
        self.result: JobResult | None = None
        self.began = time.time()
        self.update = 0
        """The last one that its ranks know of."""
        self._directory = directory
        environment = {"ZERORT_FLIGHT_DIR": str(directory / "flights"), "ZERORT_SHM_DIR": shm}
        words = [Path(__file__), "rank", directory, str(number), str(steps)]

        def run() -> None:
            self.result = run_job(RANKS, words, timeout=limit, env=environment)

        directory.mkdir(parents=True, exist_ok=True)
        (directory / "diary").touch()
        self._read = (directory / "diary").stat().st_size
        self._thread = threading.Thread(target=run)
        self._thread.start()

    def is_over(self, within: float = 0.005) -> bool:
        self._thread.join(within)
        return not self._thread.is_alive()

    def follow(self) -> None:
        """Read what the ranks have noted since the last look."""
        events, self._read = read_diary(self._directory, self._read)
        for event in events:
            self.update = max(self.update, event.get("update", 0))
            self.segments.update(event.get("segments", ()))
            if event["what"] in self.pids:
                self.pids[event["what"]].append(event["pid"])

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Signal a rank, and say whether it was still there."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True


def disturb(life: Life, chance: random.Random, counts: collections.Counter[str]) -> None:
    """Stop ranks for a moment, and kill one in the end, unless the job ends before; wait for its end."""
    opening = chance.random() < 1 / 8
    known = "starts" if opening else "begins"
    while len(life.pids[known]) < RANKS:
        if life.is_over():
            return
        life.follow()
    last = life.update + (0 if opening else chance.randint(*LIFE))
    stops = [] if opening else sorted(chance.randint(life.update, last) for _ in range(chance.randint(0, 3)))
    while life.update < last and not life.is_over():
        life.follow()
        if stops and life.update >= stops[0]:
            del stops[0]
            stopped = chance.choice(life.pids[known])
            counts["stops"] += life.signal(stopped, signal.SIGSTOP)
            time.sleep(chance.uniform(*BURST))
            if chance.random() < 0.1:
                break  # one is killed while another is stopped
            life.signal(stopped, signal.SIGCONT)
    if not life.is_over(chance.uniform(0, 1.0 if opening else 0.1)):
        counts["kills"] += life.signal(chance.choice(life.pids[known]), signal.SIGKILL)
        counts["kills while opening"] += opening
    life.is_over(TIMEOUT * 10)


def modified(name: str) -> float:
    """Return when a file was last written to; now, if another job has just removed it."""
    try:
        return os.stat(name).st_mtime
    except FileNotFoundError:
        return time.time()


def lead(directory: Path, steps: int, *, seed: int, shm: str) -> tuple[collections.Counter[str], list[str]]:
    """Train with kills and stops until all steps are done; return what happened, and what must not have."""
    chance = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    segments: set[str] = set()
    while True:
        counts["lives"] += 1
        before = counts["kills"]
        life = Life(directory, counts["lives"], steps, shm=shm, limit=240.0)
        disturb(life, chance, counts)
        life.follow()
        assert life.result is not None
        if life.result.code == 0:
            return counts, []
        if life.result.timed_out or counts["kills"] == before:
            return counts, [f"life {counts['lives']} ended by itself: {life.result.output}"]
        if os.listdir(shm):
            return counts, [f"life {counts['lives']} left {os.listdir(shm)} in shared memory"]
        segments = {name for name in segments | life.segments if os.path.exists(name)}
        counts["most of MPI's segments"] = max(counts["most of MPI's segments"], len(segments))
        # By the time of the file, as who sweeps does: on a busy machine jobs make theirs long after they are started.
        old = [name for name in segments if modified(name) < life.began - SWEPT]
        if len(life.pids["begins"]) == RANKS and sees_every_process() and old:
            return counts, [f"life {counts['lives']} has not removed what killed ones left: {old}"]


def violations(events: list[Event], alone: list[Event]) -> list[str]:
    """Return what was lost: a life begins with the last step that had returned, or with the next one.

    And each step begins with the parameters that it began with on the ranks of the run that was left ``alone``.
    """
    found = []
    returned, begun = 0, {}
    parameters = {one["update"]: one["began_with"] for one in alone if one["what"] == "returned"}
    for one in events:
        if one["what"] == "returned":
            returned = max(returned, one["update"])
            if parameters.get(one["update"]) != one["began_with"]:
                found.append(f"life {one['life']}, rank {one['rank']} had other parameters before {one['update']}")
        elif one["what"] == "begins":
            who = f"life {one['life']}, rank {one['rank']}"
            expected = begun.setdefault(one["life"], one["update"])
            if one["update"] != expected:
                found.append(f"{who} began after update {one['update']}, another rank after {expected}")
            elif one["rank"] == 0 and not returned <= one["update"] <= returned + 1:
                found.append(f"{who} began after update {one['update']}, though {returned} had returned")
            if one["progress"] != ([one["rank"], one["update"]] if one["update"] else None):
                found.append(f"{who} began after update {one['update']}, and was given {one['progress']}")
    return found


def growth(events: list[Event], *, rss: int) -> list[str]:
    """Return what there was more of in the second half of a run than ever in the first.

    One more in each of a few lives, or with every tenth step, is more than the slack: two descriptors and threads that
    are there while the disk is tidied up, and the files of one step. Memory may grow by 512 bytes per step, an eighth
    of what a leak took that was found in such a run, and by ``rss`` bytes: at first a process maps what it then keeps.
    """
    samples = [one for one in events if "rss" in one]
    middle = (samples[0]["update"] + samples[-1]["update"]) // 2
    steps = samples[-1]["update"] - middle
    slack = {"descriptors": 2, "threads": 2, "scratch": 16, "last step": 16, "rss": rss + 512 * steps}
    found = []
    for name, allowed in slack.items():
        halves: tuple[list[int], list[int]] = ([], [])
        for one in samples:
            if name in one:
                halves[one["update"] > middle].append(one[name])
        most = [max(half) for half in halves]
        if most[1] > most[0] + allowed:
            found.append(f"{name}: at most {most[0]:,} in the first {steps} steps, {most[1]:,} in those after")
    return found


def values_of(directory: Path) -> dict[str, object]:
    """Return the checksums of all parameters and state that were kept last."""
    manifest = read_manifest(directory / "last")
    kinds = {kind: {n: [e[2:] for e in t.extents] for n, t in ts.items()} for kind, ts in manifest.tensors.items()}
    return {"updates": manifest.meta["updates"], **kinds}


def most(events: list[Event]) -> str:
    """Say how much there was at most."""
    held: dict[str, int] = {}
    for one in events:
        for name, amount in one.items():
            if name in ("rss", "descriptors", "threads", "scratch", "last step"):
                held[name] = max(held.get(name, 0), amount)
    return json.dumps(held)


def slope(events: list[Event]) -> float:
    """Return by how many bytes per step the memory of a rank grew in the second half, at most."""
    slopes = []
    for rank in range(RANKS):
        samples = [(one["update"], one["rss"]) for one in events if "rss" in one and one["rank"] == rank]
        slopes.append(float(np.polyfit(*zip(*samples[len(samples) // 2 :], strict=True), 1)[0]))
    return max(slopes)


def main(where: str, seed: int, steps: int) -> int:
    """Run both, and compare them."""
    began = time.monotonic()
    run = Path(where).absolute()
    with tempfile.TemporaryDirectory(prefix="zerort-soak-", dir="/dev/shm") as memory:
        alone, windows = Path(memory) / "alone", Path(memory) / "windows"
        windows.mkdir()
        undisturbed = Life(alone, 0, steps, shm=str(windows), limit=240.0 + steps)
        while not undisturbed.is_over(1.0):
            pass
        assert undisturbed.result is not None
        if undisturbed.result.code:
            print(f"The run that was left alone ended by itself: {undisturbed.result.output}")
            return 1
        counts, wrong = lead(run, steps, seed=seed, shm=str(windows))
        notes = {name: read_diary(one)[0] for name, one in (("alone", alone), ("disturbed", run))}
        if not wrong:
            digests = [{one["digest"] for one in events if one["what"] == "ends"} for events in notes.values()]
            if digests[0] != digests[1] or len(digests[0]) != 1 or values_of(alone) != values_of(run):
                wrong.append(f"other values than those of the run that was left alone: {digests}")
            wrong += [f"damaged: {one}" for one in verify(run / "last")]
            wrong += violations(notes["disturbed"], notes["alone"])
            wrong += [f"alone, {one}" for one in growth(notes["alone"], rss=3 << 18)]
            wrong += [f"disturbed, {one}" for one in growth(notes["disturbed"], rss=3 << 20)]
            left = [str(one) for one in (*(run / "scratch").iterdir(), *windows.iterdir())]
            wrong += [f"left behind: {left}"] if left else []
            if steps >= 200 and not (counts["kills"] and counts["stops"]):
                wrong.append("too little happened")
    print(f"seed {seed}: {steps} steps in {time.monotonic() - began:.0f} s, {json.dumps(counts)}, {len(wrong)} wrong")
    for name, events in notes.items():
        print(f"{name}: at most {most(events)}")
    print(f"alone: {slope(notes['alone']):.0f} bytes of memory per step in the second half")
    print(*wrong[:10], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        train(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
