"""A rank of a method: builds it, then takes steps when `jobs.Job` says so, or some at once when started by hand.

PYTHONPATH=benchmarks mpirun -n 2 python -m peers zero3 --steps 10
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy and torch are loaded: a rank is a worker already
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import gc
import json
import socket
import sys
import time
import traceback
from typing import Any

from peers.work import CONFIGS, METHODS, REFERENCE, Running, Work
from zerort.comm.bootstrap.environment import launched_rank, launched_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=[*METHODS, "reference"])
    parser.add_argument("--config", choices=CONFIGS, default="gpt30m")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--steps", type=int, default=10, help="without --socket: take so many and print them")
    parser.add_argument("--ranks", type=int, help="for the reference: whose batches it takes")
    parser.add_argument("--socket", help="where `jobs.Job` listens")
    options = parser.parse_args()
    work = Work(
        CONFIGS[options.config],
        rank=launched_rank() or 0,
        ranks=options.ranks or launched_size() or 1,
        clip=options.clip,
    )
    method = REFERENCE if options.method == "reference" else METHODS[options.method]
    if options.socket is None:
        by_hand(method.build(work), work, options.steps)
    else:
        serve(method, work, options.socket)


def by_hand(running: Running, work: Work, steps: int) -> None:
    """Take steps and print them."""
    for at in range(steps):
        began = time.perf_counter()
        loss = running.step(at)
        if work.rank == 0:
            print(f"step {at:3}  loss {loss:.7f}  {1e3 * (time.perf_counter() - began):7.1f} ms", flush=True)
    if work.rank == 0:
        print(f"peak RSS {peak_rss_nbytes() / 2**20:.0f} MiB")
    running.close()


def serve(method: Any, work: Work, path: str) -> None:
    """Do what the other end of the socket says, until it hangs up."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        words = line.makefile("rw")

        def say(**facts: Any) -> None:
            words.write(json.dumps(facts) + "\n")
            words.flush()

        try:
            import torch

            torch.set_num_threads(1)
            say(rank=work.rank, pid=os.getpid())
            began = time.perf_counter()
            running = method.build(work)
            running.meet()
            say(start=time.perf_counter() - began - work.model_seconds)
            for order in map(json.loads, words):
                if order["do"] == "close":
                    running.close()
                    say(closed=True)
                    break
                say(**take_steps(running, order["first"], order["count"]), rss=peak_rss_nbytes())
        except BaseException as error:
            traceback.print_exc()
            say(error="".join(traceback.format_exception_only(error)).strip())
            raise


def take_steps(running: Running, first: int, count: int) -> dict[str, Any]:
    """Take some steps in a row, after a meeting of all ranks and up to the next; seconds are per step."""
    gc.collect()  # not in the middle of a step, for no method
    gc.disable()
    running.meet()
    began, cpu = time.perf_counter(), time.process_time()
    losses = [running.step(at) for at in range(first, first + count)]
    running.meet()
    seconds, cpu = (time.perf_counter() - began) / count, (time.process_time() - cpu) / count
    gc.enable()
    return {"seconds": seconds, "cpu": cpu, "losses": losses}


def peak_rss_nbytes() -> int:
    """Return the most memory that this process has had at once, shared pages in full."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(row.split()[1]) for row in file if row.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    main()
    sys.stdout.flush()
