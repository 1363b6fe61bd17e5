"""Whatever stands in a file or an argument: an answer or one of zerort's errors, in little time and memory.

Inputs are good ones, changed at random: `make test` tries ten thousand, ``ZERORT_EXECUTIONS=100000`` (`make fuzz`) as
many as it says. A failure names its seed: ``ZERORT_FUZZ_SEED`` begins there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import string
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from manifest_files import OTHERS, sealed, text_of

import zerort as zr
from zerort.checkpoint.files import lease
from zerort.checkpoint.format.manifest import decode
from zerort.cli.plan.models import read_model
from zerort.comm.guard.call import Call
from zerort.comm.guard.standing import Standing
from zerort.comm.guard.verdict import mismatch_error, tell_story
from zerort.comm.transports.node.board import Board, board_nbytes
from zerort.config import parse_bytes
from zerort.errors import CheckpointError, RankFailedError, ZerortError
from zerort.storage.files.faults import parse

EXECUTIONS = int(os.environ.get("ZERORT_EXECUTIONS", "10000"))
FIRST = int(os.environ.get("ZERORT_FUZZ_SEED", "0"))
MOST_NBYTES = 256 * 1024**2
MOST_SECONDS = 5.0

SCALARS = (
    *OTHERS,
    4096,
    2**31,
    2**63,
    -(2**70),
    1e308,
    "float32",
    "F32",
    "shape",
    "w",
    "../x",
    "/etc/passwd",
    "\ud800",
    "\0",
)
MANIFEST = {
    "created": "2026-01-02T03:04:05+00:00",
    "zerort": "0.1.0",
    "ranks": 2,
    "meta": {"updates": 3, "steps": {"w": 3}},
    "progress": [None, {"at": 5}],
    "files": [["shard-00000.0123456789abcdef.bin", 8192], ["shard-00001.0123456789abcdef.bin", 4096]],
    "kinds": {
        "parameter": {"w": ["float32", [8, 9], [[0, 0, 0, 40, 7], [1, 64, 40, 32, 8]]]},
        "buffer": {"b": ["int8", [], [[0, 4096, 0, 1, 9]]]},
    },
}
HEAD = {"__metadata__": {"format": "np"}, "w": {"dtype": "F32", "shape": [8, 9], "data_offsets": [0, 288]}}
LEASE = ["0123456789abcdef", ["89abcdef", "0000beef", 77, 1234], "node7", "job 4711", "2026"]
MODELS = (
    {"weight_map": {"w": "m.safetensors"}},
    {"block0": {"w": {"shape": [3, 4], "dtype": "float32"}}},
    {"w": [3, 4]},
)


def anything(chance: random.Random, depth: int = 3) -> Any:
    """Return some JSON value."""
    kind = chance.randrange(6) if depth else 0
    if kind == 4:
        return [anything(chance, depth - 1) for _ in range(chance.randrange(5))]
    if kind == 5:
        return {chance.choice(["w", "", "dtype", "shape", "x"]): anything(chance, depth - 1) for _ in range(3)}
    return chance.choice(SCALARS) if chance.random() < 0.8 else chance.randrange(-5, 10**6)


def changed(chance: random.Random, value: Any) -> Any:
    """Return a JSON value with a few things in it replaced, left out or doubled."""
    made = json.loads(json.dumps(value))
    for _ in range(chance.randrange(1, 4)):
        parent, key, here = None, None, made
        while isinstance(here, (dict, list)) and here and chance.random() < 0.8:
            parent = here
            key = chance.choice([*here]) if isinstance(here, dict) else chance.randrange(len(here))
            here = parent[key]
        if parent is None:
            made = anything(chance)
        elif chance.random() < 0.2:
            del parent[key]
        elif chance.random() < 0.2 and isinstance(parent, list):
            parent.insert(key, here)
        else:
            parent[key] = anything(chance)
    return made


def garbled(chance: random.Random, text: bytes) -> bytes:
    """Return a text with a few bytes replaced, left out or put in."""
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(text) + 1)
        new = chance.choice(
            [b"", b"[" * chance.randrange(3000), b"9" * chance.randrange(6000), chance.randbytes(9), b"NaN"]
        )
        text = text[:at] + new + text[at + chance.randrange(9) :]
    return text


def manifests(chance: random.Random, folder: Path) -> None:
    with contextlib.suppress(CheckpointError):
        assert decode(text_of(changed(chance, MANIFEST)), path="x").nbytes >= 0


def manifests_of_other_bytes(chance: random.Random, folder: Path) -> None:
    with contextlib.suppress(CheckpointError):
        decode(sealed(garbled(chance, b'"body":' + json.dumps(MANIFEST).encode() + b"}\n")), path="x")


def heads_of_safetensors(chance: random.Random, folder: Path) -> None:
    text = json.dumps(changed(chance, HEAD)).encode()
    if chance.random() < 0.3:
        text = garbled(chance, text)
    length = len(text) if chance.random() < 0.8 else chance.randrange(2**64)
    (folder / "m.safetensors").write_bytes(struct.pack("<Q", length) + text)
    with contextlib.suppress(ZerortError):
        read_model(str(folder / "m.safetensors"))


def lists_of_parameters(chance: random.Random, folder: Path) -> None:
    (folder / "model.json").write_text(json.dumps(changed(chance, chance.choice(MODELS))))
    with contextlib.suppress(ZerortError):
        read_model(str(folder / "model.json"))


def leases(chance: random.Random, folder: Path) -> None:
    text = json.dumps(changed(chance, LEASE)).encode()
    (folder / "lease").write_bytes(garbled(chance, text) if chance.random() < 0.3 else text)
    with open(folder / "lease", "rb") as file:
        holder = lease._parse(file.fileno())
    if holder is not None:
        assert str(holder).startswith("process ")
        assert isinstance(holder.is_elsewhere, bool)


def plans_and_budgets(chance: random.Random, folder: Path) -> None:
    def size() -> Any:
        return chance.choice([*SCALARS, f"{chance.random() * 1000:.3f}{chance.choice('KMGTPkm')}iB"])

    def tier() -> Any:
        return chance.choice([*zr.Tier, *SCALARS])

    stage = chance.choice([0, 1, 2, 3, *SCALARS])
    with contextlib.suppress(ZerortError):
        assert str(zr.Plan.zero(stage, parameter=tier(), gradient=tier(), state=tier()))
    with contextlib.suppress(ZerortError):
        assert str(zr.Plan.fit(device=size(), host=size(), nvme=size(), stage=stage))


def sizes_and_faults(chance: random.Random, folder: Path) -> None:
    letters = "0123456789.KMGTPiB@:=,op any" if chance.random() < 0.7 else string.printable
    text = "".join(chance.choices(letters, k=chance.randrange(40))) * chance.choice([1, 1, 1, 200])
    for read in (parse_bytes, parse):
        with contextlib.suppress(ZerortError):
            read(text)


def stories_and_farewells(chance: random.Random, folder: Path) -> None:
    """What ranks tell each other reaches the others whole, whatever users called things and errors said."""

    def text() -> str:
        return "".join(chance.choices('ab "\\\n\0\x7fé…\U0001f600\ud800', k=chance.randrange(2000)))

    board = Board(memoryview(bytearray(board_nbytes(1))), 0, 1)
    story = tell_story(Call(text(), text(), name=text(), complaint=chance.choice(["", text()])))
    board.write_news(story)
    assert board.read_news() == [story]
    assert str(mismatch_error("world", [story]))
    standing = Standing(updates=chance.choice([None, 0, 10**9]))
    standing.take_exit(chance.choice([None, ValueError(text()), SystemExit(chance.choice(SCALARS)), RankFailedError()]))
    board.write_farewell(standing.words())
    assert Standing.read(board.read_farewell(0)) == standing


TARGETS = (
    manifests,
    manifests_of_other_bytes,
    heads_of_safetensors,
    lists_of_parameters,
    leases,
    plans_and_budgets,
    sizes_and_faults,
    stories_and_farewells,
)


def resident(which: str) -> int:
    """Return how many bytes of memory this process has (VmRSS), or had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_only_errors_of_our_own_in_little_time_and_memory(target, tmp_path):
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of before is that of other tests
    for number in range(FIRST, FIRST + EXECUTIONS // len(TARGETS) + 1):
        began = time.process_time()
        try:
            target(random.Random(number), tmp_path)
        except Exception as error:
            raise AssertionError(f"ZERORT_FUZZ_SEED={number}: {type(error).__name__}: {error}") from error
        assert time.process_time() - began < MOST_SECONDS, f"ZERORT_FUZZ_SEED={number}"
    grown = resident("VmHWM") - before
    assert grown <= MOST_NBYTES, f"{grown} bytes more"
