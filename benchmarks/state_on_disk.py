"""Update parameters whose state is on a disk: AdamW's state in 12 bytes per parameter, in 10, and in about 4.

    python benchmarks/state_on_disk.py                     # as fast as the disk is
    python benchmarks/state_on_disk.py --limit 1GB         # so much read, and so much written, a second (root)

bfloat16 parameters and gradients are in memory, masters and moments on the disk; one process; forms take turns. What
is timed is the step: read, update, write back. The limit needs the blkio controller (v1) of a control group that this
user may write to, and counts for direct I/O, which is what the store does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import zerort as zr
from zerort.config import format_bytes, parse_bytes

FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "remainder": {"master": "remainder"},
    "int8": {"moments": "int8", "master": "remainder"},
}
BLKIO = Path("/sys/fs/cgroup/blkio")


def main() -> None:
    """Take turns, show the ratios."""
    options = parse()
    with contextlib.ExitStack() as stack:
        if options.limit:
            stack.enter_context(disk_limited(options.dir, options.limit))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir))
        steps = {name: stack.enter_context(steps_of(form, options.numel, scratch)) for name, form in FORMS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in FORMS}
        moved: dict[str, int] = {}
        for turn in range(1 + options.rounds):
            for name, step in steps.items():
                report, took = step()
                moved[name] = sum(report.bytes_tiered.values())
                if turn:  # the first touches memory for the first time
                    seconds[name].append(took)
    limit = f"limited to {format_bytes(options.limit)}/s each way" if options.limit else "without a limit"
    print(f"{options.numel:,} parameters, a disk {limit}, {options.rounds} rounds; median seconds of a step")
    for name, took in seconds.items():
        ratios = np.array(took) / np.array(seconds["float32"])
        print(
            f"{name:10} {np.median(took):7.3f} s   {np.median(ratios):.2f} of float32's   "
            f"{format_bytes(moved[name])} read and written: {moved[name] / options.numel:.2f} bytes per parameter"
        )


@contextlib.contextmanager
def steps_of(form: dict[str, Any], numel: int, scratch: str) -> Iterator[Any]:
    """Open a runtime of one rank with AdamW in a form; yield what makes a step, and returns its report and seconds."""
    plan, optimizer = zr.Plan.zero(1, state="nvme"), zr.AdamW(lr=1e-3, **form)
    with (
        zr.open_group(kind="solo") as group,
        zr.open(plan=plan, optimizer=optimizer, group=group, scratch=scratch) as rt,
    ):
        values = np.full(numel, 0.5, np.float32).astype(zr.native.BFLOAT16)
        unit = rt.register("model", {"w": values})
        gradient = np.full(numel, 1e-3, np.float32).astype(zr.native.BFLOAT16)

        def step() -> tuple[zr.StepReport, float]:
            unit.reduce({"w": gradient})
            began = time.perf_counter()
            report = rt.step()
            return report, time.perf_counter() - began

        yield step


@contextlib.contextmanager
def disk_limited(directory: str, nbytes: int) -> Iterator[None]:
    """Let this process read and write so many bytes a second on the disk of a directory."""
    device = os.stat(directory).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    group = BLKIO / f"zerort-bench-{os.getpid()}"
    try:
        group.mkdir()
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(f"{numbers} {nbytes}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise SystemExit(f"Expected a blkio control group (v1) to write to, got {error}. Leave --limit out.") from error
    try:
        yield
    finally:
        (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--numel", type=int, default=200_000_000, help="parameters (default: %(default)s)")
    add("--dir", default=tempfile.gettempdir(), help="a directory on the disk (default: %(default)s)")
    add("--limit", type=parse_bytes, help="bytes per second, each way; by a control group")
    add("--rounds", type=int, default=5, help="that are counted (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
