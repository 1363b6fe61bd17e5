"""Slow one rank down to half its speed: when it is named, and what a step takes once it is relieved.

    mpirun -n 2 python benchmarks/slow_rank.py                      # a quota of CPU time, by a control group
    mpirun -n 2 python benchmarks/slow_rank.py --by stop            # SIGSTOP and SIGCONT in turns
    mpirun -n 2 python benchmarks/slow_rank.py --share 0.3         # on a machine with other load: its speed is printed

The loop computes a little for each sample, calls ``rt.rebalance("auto")`` once the report names a rank, and once more
after as many steps as were needed for that. The ideal is what ranks of these speeds would take if samples could be
divided at will, and nothing else took time: ``batch / (samples per second of all ranks)``, where each rank's speed is
measured in the same run, all of them computing at once. Every rank needs a core of its own. A quota needs a control
group with a CPU controller (v2: ``cpu.max``, v1: ``cpu.cfs_quota_us``) that this user may write to; then each rank has
one, with a large weight: other processes of the machine count for less.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np

import zerort as zr
from zerort.comm.agreed import gather_json

PERIOD = 0.01
"""Seconds in which a slow rank has its share of a core once."""


def main() -> None:
    """Train, slow a rank down, relieve it, show both figures."""
    options = parse()
    warnings.simplefilter("ignore", RuntimeWarning)  # the report names the rank, too
    with zr.open(plan=zr.Plan.zero(2), optimizer=zr.AdamW(lr=1e-3)) as rt, contextlib.ExitStack() as stack:
        line = rt.register("line", {"w": np.zeros(64, np.float32)})
        stack.enter_context(at_speed(options.by, 1.0))
        compute = work_of(options.milliseconds)
        seconds: list[float] = []
        named: list[int] = []
        relieved: list[str] = []
        speeds: list[float] = []
        how = ""
        order = zr.data.Order(length=options.batch * 1000, batch=options.batch, seed=7)
        for number, indices in enumerate(rt.take(order)):
            if number == options.before:
                stack.close()
                mine = stack.enter_context(at_speed(options.by, options.share if rt.rank == options.slow else 1.0))
                how = gather_json(rt.group, mine)[options.slow]
                speeds = gather_json(rt.group, speed_of(compute))
            began = time.perf_counter()
            for _ in indices:
                compute()
            line.reduce({"w": np.full(64, len(indices), np.float32)})
            report = rt.step(weight=len(indices))
            seconds.append(time.perf_counter() - began)
            after = number + 1 - options.before
            if after > 0 and not named and (report.straggler or "").startswith(f"rank {options.slow} "):
                named.append(after)
            if named and (after == named[0] or after == 2 * named[0] or after == 3 * named[0]):
                relieved.append(str(rt.rebalance("auto")))
            if after == options.steps:
                break
        if rt.rank == 0:
            show(options, how, seconds, named, relieved, speeds)


def show(
    options: argparse.Namespace,
    how: str,
    seconds: list[float],
    named: list[int],
    relieved: list[str],
    speeds: list[float],
) -> None:
    """Print when the rank was named, and what steps took."""
    ideal = options.batch / sum(speeds)
    fast = max(speed for rank, speed in enumerate(speeds) if rank != options.slow)
    print(f"{len(speeds)} ranks; rank {options.slow} slowed by {how}: {speeds[options.slow] / fast:.2f} of the fastest")
    print(f"  named after {named[0]} steps" if named else f"  not named within {options.steps} steps")
    for text in relieved:
        print(f"  {text}")
    slow = seconds[options.before + 1 : options.before + (named[0] if named else options.steps)]
    for what, some in (("before it", seconds[5 : options.before]), ("slow", slow), ("relieved", seconds[-20:])):
        median = float(np.median(some))
        print(f"  steps {what:9} {1e3 * median:6.1f} ms, {median / ideal:.2f} of the ideal for those speeds")


def work_of(milliseconds: float) -> Callable[[], None]:
    """Return what computes for so long on a core of this machine."""
    x = np.random.default_rng(0).normal(size=20_000)

    def once() -> None:
        np.sin(x).sum()

    for _ in range(20):
        once()
    began = time.perf_counter()
    for _ in range(50):
        once()
    count = max(round(milliseconds / 1e3 / ((time.perf_counter() - began) / 50)), 1)

    def compute() -> None:
        for _ in range(count):
            once()

    return compute


def speed_of(compute: Callable[[], None], *, seconds: float = 1.0) -> float:
    """Return how many samples this rank computes in a second."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        compute()
        count += 1
    return count / (time.perf_counter() - began)


@contextlib.contextmanager
def at_speed(by: str, share: float) -> Iterator[str]:
    """Give this process a share of a core inside, and say how."""
    opened = None if by == "stop" else open_quota(share)
    if opened is not None:
        try:
            yield f"a quota of {share} cores ({opened[0]})"
        finally:
            close_quota(*opened)
        return
    if by == "quota":
        raise SystemExit("Expected a control group with a CPU controller to write to, got none. Use --by stop.")
    if share == 1:
        yield ""
        return
    whom, child = os.getpid(), os.fork()
    if not child:
        stop_and_go(whom, share)
    try:
        yield "SIGSTOP and SIGCONT in turns"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.kill(whom, signal.SIGCONT)


def stop_and_go(whom: int, share: float) -> None:
    """Let a process go for a share of the time, until it has ended."""
    try:
        while os.getppid() == whom:
            os.kill(whom, signal.SIGSTOP)
            time.sleep(PERIOD * (1 - share))
            os.kill(whom, signal.SIGCONT)
            time.sleep(PERIOD * share)
    finally:
        os._exit(0)


def open_quota(share: float) -> tuple[str, str] | None:
    """Put this process into a control group with a share of a core; return it, and that it came from, or None."""
    period, quota = round(1e6 * PERIOD), round(1e6 * PERIOD * share)
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in lines:
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A group counts as one process among others: with a large weight, the quota alone is what slows it down.
        limits = {"cpu.max": f"{quota} {period}", "cpu.weight": "10000"}
        if controllers:
            limits = {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota), "cpu.shares": "100000"}
        root = f"/sys/fs/cgroup/{controllers}" if controllers else "/sys/fs/cgroup"
        for parent in dict.fromkeys((path, os.path.dirname(path))):  # in v2 a group with processes has no children
            made = os.path.join(root, parent.lstrip("/"), f"zerort-speed-{os.getpid()}")
            try:
                os.mkdir(made)
                for name, value in limits.items():
                    write(os.path.join(made, name), value)
                write(os.path.join(made, "cgroup.procs"), str(os.getpid()))
            except OSError:
                with contextlib.suppress(OSError):
                    os.rmdir(made)
            else:
                return made, os.path.join(root, path.lstrip("/"))
    return None


def close_quota(group: str, came_from: str) -> None:
    """Go back to where this process came from."""
    write(os.path.join(came_from, "cgroup.procs"), str(os.getpid()))
    os.rmdir(group)


def write(path: str, text: str) -> None:
    """Write to a file of the kernel that is there."""
    with open(path, "r+", encoding="ascii") as file:
        file.write(text)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=("auto", "quota", "stop"), default="auto", help="(default: %(default)s)")
    parser.add_argument("--slow", type=int, default=1, metavar="RANK", help="(default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.5, help="of a core that it has (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=120, help="samples of a step (default: %(default)s)")
    parser.add_argument("--milliseconds", type=float, default=2.0, help="for a sample (default: %(default)s)")
    parser.add_argument("--before", type=int, default=20, help="steps before it is slow (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=80, help="steps after that (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
