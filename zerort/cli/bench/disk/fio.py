"""Ask fio, if it is installed, how fast a disk is: the same file, blocks and number of jobs."""

from __future__ import annotations

import json
import subprocess

__all__ = ["fio_gbs"]


def fio_gbs(fio: str, path: str, verb: str, nbytes: int, *, threads: int) -> float:
    """Return the GB/s at which fio writes or reads a file of ``nbytes`` bytes in blocks of 4 MiB.

    Args:
        fio: The command.
        path: The file; a write replaces what is in it.
        verb: ``"write"`` or ``"read"``.
        nbytes: The file's size: whole blocks for each of the jobs.
        threads: How many jobs.

    Raises:
        OSError: It failed, or said something that cannot be read.
    """
    part = nbytes // threads
    words = [
        *(fio, "--name=zerort", f"--filename={path}", f"--rw={verb}", "--bs=4M", "--direct=1", "--ioengine=psync"),
        *("--thread", f"--numjobs={threads}", f"--size={part}", f"--offset_increment={part}", "--group_reporting"),
        *("--end_fsync=1", "--output-format=json"),
    ]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        job = json.loads(answer.stdout)["jobs"][0][verb]
        return float(job["bw_bytes"]) / 1e9
    except (ValueError, KeyError, IndexError):
        raise OSError(
            0, f"Expected figures from {fio}, got {(answer.stderr or answer.stdout).strip()[:200]!r}"
        ) from None
