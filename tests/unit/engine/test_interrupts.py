"""KeyboardInterrupt at the n-th traced line of a step, a save and a load: the verb is whole, or the group is broken.

Two ranks as threads, over shared memory; one of them is interrupted. Nobody hangs, whoever saves afterwards is refused
or saves a whole state, and the checkpoint of before can be read. ``ZERORT_STRIDE=1`` takes every n (`make faults`).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from interrupter import Interrupter

import zerort as zr
from zerort import native
from zerort.checkpoint import verify
from zerort.comm.transports.node.meeting import open_control
from zerort.comm.transports.node.transport import NodeTransport
from zerort.config import GroupOptions
from zerort.errors import RankFailedError, ZerortError

OURS = os.path.dirname(zr.__file__) + os.sep
STRIDE = int(os.environ.get("ZERORT_STRIDE", "211"))
OPTIONS = GroupOptions(timeout=20.0, staging_nbytes=64 * 1024)
CASES = [("step", 0), ("step", 3), ("save", 3), ("load", 3)]  # a verb, and the stage of the plan


def run(directory: Path, verb: str, stage: int, at: int) -> int:
    """Interrupt rank 0 at a line of ``verb`` and return how many lines it ran there."""
    control = open_control(2, "/dev/shm")
    seen, stories = [0], ["", ""]
    kept, path = str(directory / "kept"), str(directory / f"{verb} {stage} {at}")

    def body(rank: int) -> None:
        transport = NodeTransport(
            control.path, rank, 2, name="world", options=OPTIONS, in_native=native.AVAILABLE, sees_processes=True
        )
        transport.start()
        group = zr.Group(transport)
        rt = zr.open(plan=zr.Plan.zero(stage), optimizer=zr.SGD(lr=0.25), group=group)
        try:
            units = [rt.register(name, {name: np.zeros(500, np.float32)}) for name in ("a", "b")]
            for unit in units:
                unit.reduce({unit.name: np.ones(500, np.float32)})
            rt.step()
            rt.save(path)
            for unit in units:
                unit.reduce({unit.name: np.ones(500, np.float32)})
            verbs = {"step": rt.step, "save": lambda: rt.save(path), "load": lambda: rt.load(path)}
            interrupter = Interrupter(at if rank == 0 else 0, within=OURS)
            try:
                with interrupter:
                    verbs[verb]()
            except (KeyboardInterrupt, ZerortError) as error:
                stories[rank] = type(error).__name__
            seen[0] = max(seen[0], interrupter.seen)
            try:
                rt.save(kept)
                stories[rank] += " saved"
            except ZerortError as error:
                stories[rank] += f" refused {error}"
        finally:
            rt.__exit__(RankFailedError, None, None)
            group.close()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    control.close()
    assert not any(thread.is_alive() for thread in threads), (verb, stage, at, stories)
    saved = ["saved" in story for story in stories]
    assert saved in ([True, True], [False, False]), (verb, stage, at, stories)
    for one in [path, *([kept] if saved[0] else [])]:
        assert verify(one) == [], (verb, stage, at, stories)
        assert set(values_of(one)) in ({-0.25}, {-0.5}), (verb, stage, at, stories)
    return seen[0]


def values_of(path: str) -> list[float]:
    """Return the values in a checkpoint, each once."""
    with zr.open_group(kind="solo") as alone, zr.open(optimizer=zr.SGD(lr=0.25), group=alone) as rt:
        units = [rt.register(name, {name: zr.TensorSpec((500,), "float32")}) for name in ("a", "b")]
        rt.load(path)
        found = []
        for unit in units:
            with unit.gathered() as values:
                found += np.unique(values[unit.name]).tolist()
        return found


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Python drops what a closing generator raises
@pytest.mark.parametrize(("verb", "stage"), CASES)
def test_an_interrupt_at_any_line_finishes_the_call_or_breaks_the_group(tmp_path: Path, verb: str, stage: int) -> None:
    lines = run(tmp_path, verb, stage, 10**9)
    assert lines > 300
    for at in range(1, lines, STRIDE):
        run(tmp_path, verb, stage, at)
