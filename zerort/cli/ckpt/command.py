"""``zerort ckpt inspect|verify|export``: one process, no MPI.

exit code 0: fine     1: the checkpoint is damaged, or the file system refused     2: not a checkpoint, wrong words
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerort.checkpoint import Damage, Manifest, StoredTensor, export, read_manifest, verify
from zerort.checkpoint.format.coded import stored_tensors
from zerort.cli.arguments import UsageError
from zerort.cli.screen import Screen, new_table
from zerort.config import format_bytes
from zerort.errors import CallError, CheckpointError, CorruptCheckpointError, StorageError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["run_export", "run_inspect", "run_verify"]

_MIB = 1024**2
_LONG = 110
"""Characters of a value of meta that are shown; ``--json`` shows all."""


def run_inspect(path: str, *, tensors: bool, as_json: bool) -> int:
    """Show what a checkpoint holds. Return the exit code."""
    with _wrong_words():
        manifest = read_manifest(path)
    if as_json:
        print(json.dumps(_document(path, manifest, tensors=tensors), indent=2))
        return 0
    screen = Screen()
    for line in _head(path, manifest):
        screen.print(line)
    screen.print("")
    screen.print(_kinds_table(manifest))
    if tensors:
        screen.print(_tensors_table(manifest))
    return 0


def run_verify(path: str) -> int:
    """Check every byte of a checkpoint. Return the exit code."""
    screen = Screen()
    began = time.perf_counter()
    with _wrong_words():
        manifest = read_manifest(path)
        with _bar(screen, manifest.nbytes, "verifying") as progress:
            damages = verify(path, progress=progress)
    for line in _damage_lines(damages):
        screen.print(line)
    extents = sum(len(tensor.extents) for kind in manifest.tensors.values() for tensor in kind.values())
    if damages:
        files = len({damage.file for damage in damages})
        screen.print(
            f"{path}: DAMAGED: {len(damages)} of {extents} extents, in {files} of {len(manifest.files)} files. "
            "Load another checkpoint."
        )
        return 1
    seconds = time.perf_counter() - began
    speed = f"{format_bytes(manifest.nbytes)} in {seconds:.2f} s"
    screen.print(f"{path}: ok: {extents} extents in {len(manifest.files)} files, {speed}")
    return 0


def run_export(path: str, out: Path, *, kind: str, dtype: str | None, force: bool) -> int:
    """Write the full tensors of one kind as safetensors. Return the exit code."""
    screen = Screen()
    with _wrong_words():
        stored = stored_tensors(read_manifest(path), kind)
        total = sum(tensor.nbytes for tensor in stored.values())
        with _bar(screen, total, "exporting") as progress:
            nbytes = export(path, out, kind=kind, dtype=dtype, overwrite=force, progress=progress)
    screen.print(f"{out}: {len(stored)} tensors of kind {kind!r}, {format_bytes(nbytes)}")
    return 0


@contextlib.contextmanager
def _wrong_words() -> Iterator[None]:
    """Let what the user named wrongly end with exit code 2, and what is broken with 1."""
    try:
        yield
    except (CorruptCheckpointError, StorageError):
        raise
    except (CallError, CheckpointError) as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def _bar(screen: Screen, nbytes: int, text: str) -> Iterator[Callable[[int], None]]:
    """Show a bar in MiB; yield what is told of bytes."""
    done, shown = 0, 0
    lock = threading.Lock()
    with screen.bar(-(-nbytes // _MIB)) as bar:
        bar.step(f"{text}, MiB")

        def step(more: int) -> None:
            nonlocal done, shown
            with lock:
                done += more
                now = -(-done // _MIB) if done == nbytes else done // _MIB
                if now > shown:
                    bar.step(f"{text}, MiB", advance=now - shown)
                    shown = now

        yield step


def _damage_lines(damages: list[Damage]) -> Iterator[str]:
    """Yield a line for each damaged tensor of each file."""
    for (file, kind, tensor), group in groupby(damages, key=lambda one: (one.file, one.kind, one.tensor)):
        first, *more = group
        rest = f" (and {len(more)} extents more)" if more else ""
        yield f"{file}: {kind} {tensor!r}: {first.nbytes} bytes from offset {first.offset}: {first.reason}{rest}"


def _summary(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return {
        "tensors": len(tensors),
        "numel": sum(tensor.numel for tensor in tensors.values()),
        "dtypes": sorted({tensor.dtype for tensor in tensors.values()}),
        "nbytes": sum(tensor.nbytes for tensor in tensors.values()),
        "stored_nbytes": sum(tensor.stored_nbytes for tensor in tensors.values()),
    }


def _document(path: str, manifest: Manifest, *, tensors: bool) -> dict[str, Any]:
    kinds = {kind: _summary(stored) for kind, stored in manifest.tensors.items()}
    if tensors:
        for kind, stored in manifest.tensors.items():
            kinds[kind]["names"] = {
                name: {"dtype": one.dtype, "shape": list(one.shape), "nbytes": one.nbytes, "extents": len(one.extents)}
                for name, one in stored.items()
            }
    return {
        "path": os.path.abspath(path),
        "format": manifest.format,
        "created": manifest.created,
        "zerort": manifest.zerort,
        "ranks": manifest.ranks,
        "nbytes": manifest.nbytes,
        "meta": dict(manifest.meta),
        "progress": list(manifest.progress),
        "files": [{"name": file.name, "nbytes": file.nbytes} for file in manifest.files],
        "kinds": kinds,
    }


def _head(path: str, manifest: Manifest) -> Iterator[str]:
    rows: dict[str, str] = {
        "checkpoint": os.path.abspath(path),
        "created": f"{manifest.created} by zerort {manifest.zerort} (format {manifest.format})",
    }
    known = [key for key in ("updates", "plan", "optimizer") if key in manifest.meta]
    for key in (*known, *(key for key in manifest.meta if key not in known)):
        value = manifest.meta[key]
        text = value if isinstance(value, str) else json.dumps(value)
        rows[key] = text if len(text) <= _LONG else f"{text[:_LONG]}…"
    rows["ranks"] = str(manifest.ranks)
    nbytes = sum(file.nbytes for file in manifest.files)
    rows["files"] = f"{len(manifest.files)} data files, {format_bytes(nbytes)}"
    sparse = [one for stored in manifest.tensors.values() for one in stored.values() if one.is_sparse]
    if sparse:
        there = format_bytes(sum(one.stored_nbytes for one in sparse))
        whole = format_bytes(sum(one.nbytes for one in sparse))
        rows["sparse"] = f"{len(sparse)} tensors as bitmap and values: {there} of {whole}"
    width = max(map(len, rows))
    for key, text in rows.items():
        yield f"{key:<{width}}  {text}"


def _kinds_table(manifest: Manifest) -> Table:
    table = new_table("")
    table.title = None
    table.add_column("kind", no_wrap=True)
    for name in ("tensors", "elements", "dtype", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    total = {"tensors": 0, "numel": 0, "nbytes": 0}
    for kind, tensors in manifest.tensors.items():
        row = _summary(tensors)
        for key in total:
            total[key] += row[key]
        dtypes = ", ".join(row["dtypes"])
        table.add_row(kind, str(row["tensors"]), str(row["numel"]), dtypes, format_bytes(row["nbytes"]))
    table.add_row("all", str(total["tensors"]), str(total["numel"]), "", format_bytes(total["nbytes"]), style="bold")
    return table


def _tensors_table(manifest: Manifest) -> Table:
    table = new_table("tensors")
    for name in ("kind", "tensor"):
        table.add_column(name, no_wrap=True)
    for name in ("dtype", "shape", "size", "extents"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, tensors in manifest.tensors.items():
        for name, one in tensors.items():
            shape = f"({', '.join(map(str, one.shape))})"
            table.add_row(kind, name, one.dtype, shape, format_bytes(one.nbytes), str(len(one.extents)))
    return table
