"""`load`: fill every value by tensor name, whatever ranks, layout, partition and dtype it was saved with.

agree      one manifest on all ranks; it holds what is asked for             nothing is changed yet
open       every file that is needed is there and has its size               nothing is changed yet
read       extents that overlap this rank's range, checked and converted     any failure: all raise
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from zerort import trace
from zerort.checkpoint.failure import storage_error, with_progress_watch
from zerort.checkpoint.files.directory import MOST_REPLACED, is_replaced, read_manifest, replaced_too_often
from zerort.checkpoint.format.casts import FLOATS, can_convert
from zerort.checkpoint.format.manifest import Manifest
from zerort.checkpoint.reader import Damage, Fetch, ShardFiles, damage_error, fetch_all
from zerort.checkpoint.value import Value, check_values
from zerort.comm.agreed import expect_same, gather_json, raise_together
from zerort.comm.group import Group
from zerort.errors import CheckpointError
from zerort.storage.files.blocks import worker_count

__all__ = ["load", "plan_fetches"]

_SHOWN = 5
"""Names in a message, of each sort."""


def load(
    path: str | os.PathLike[str],
    group: Group,
    values: Sequence[Value],
    *,
    manifest: Manifest | None = None,
    check: Callable[[Manifest], None] = lambda manifest: None,
    strict: bool = True,
    on_read: Callable[[], None] = lambda: None,
) -> Manifest:
    """Fill the ``mine`` of every value from the checkpoint at ``path``, and return what else it holds.

    Tensors are found by kind and name. Floats are converted where the dtype differs: exactly to a wider one, rounded
    to nearest to a narrower one. Kinds that nobody asked for are not read. Padding is left as it is.

    Args:
        path: The checkpoint's directory, which all ranks see.
        group: The ranks; all of them call this. As many as there are, not as many as saved.
        values: What to fill. Every rank describes the same tensors.
        manifest: What `read_manifest` returned on this rank, to not read it again, unless another save replaces it.
        check: Raises if a checkpoint cannot be used; called before anything is changed.
        strict: Whether the tensors of each kind asked for must be exactly those of the checkpoint; else it may hold
            more.
        on_read: Called before the first value is changed. An error from then on leaves values that are not usable.

    Raises:
        CallError: A value does not fit its layout or partition.
        CheckpointError: There is no checkpoint, or it is of another model.
        CorruptCheckpointError: Its bytes are not those that were written. If the message does not say that nothing was
            changed, the values are not usable.
        StorageError: The file system refused.
    """
    where = os.path.abspath(os.fspath(path))

    def stop(damage: Damage) -> None:
        raise damage_error(where, damage, touched=True)

    with trace.span("checkpoint.load", track="checkpoint", path=where):
        found, files = _open(where, group, values, manifest=manifest, check=check, strict=strict)
        try:
            hosts = gather_json(group, socket.gethostname(), name="load hosts")
            threads = worker_count(hosts.count(hosts[group.rank]))

            def read() -> None:
                with trace.span("checkpoint.read", track="checkpoint", threads=threads):
                    fetch_all(files, threads=threads, on_damage=stop)

            on_read()
            with_progress_watch(group, read, path=where, name="load read")
        finally:
            files.close()
    return found


def _open(
    path: str,
    group: Group,
    values: Sequence[Value],
    *,
    manifest: Manifest | None,
    check: Callable[[Manifest], None],
    strict: bool,
) -> tuple[Manifest, ShardFiles]:
    """Return one manifest on all ranks, and its files, open: what is deleted from now on can still be read.

    A saver beside us may replace the checkpoint after the manifest was read, and delete files before they are open.
    Then the manifest is another one by now: all ranks begin again with that.
    """

    def refuse(damage: Damage) -> None:
        raise damage_error(path, damage, touched=False)

    def begin() -> Manifest:
        check_values(values, rank=group.rank, size=group.size, writable=True)
        found = read_manifest(path) if manifest is None else manifest
        check(found)
        _check_model(path, found, values, strict=strict)
        return found

    def open_files(found: Manifest) -> ShardFiles | Exception:
        try:
            return ShardFiles(path, found, list(plan_fetches(found, values, group.rank)), on_damage=refuse)
        except OSError as caught:
            return storage_error(caught, path=path)
        except Exception as caught:
            return caught

    # All that asks the disk is done with_progress_watch: one that does not answer is named.
    for _ in range(MOST_REPLACED):
        found = with_progress_watch(group, begin, path=path, name="load checks")
        manifest = None
        with contextlib.ExitStack() as unless_all_have:
            files = with_progress_watch(group, functools.partial(open_files, found), path=path, name="load files")
            error = files if isinstance(files, Exception) else None
            if not isinstance(files, Exception):
                unless_all_have.callback(files.close)
            told = gather_json(group, [found.digest, error is None], name="load open")
            if not isinstance(files, Exception) and all(row == [found.digest, True] for row in told):
                unless_all_have.pop_all()
                return found, files
            look_again = functools.partial(is_replaced, path, found)
            replaced = with_progress_watch(group, look_again, path=path, name="load again")
            if any(gather_json(group, replaced, name="load again")):
                continue
            expect_same(group, f"{found.digest:08x}", what=f"the manifest of {path}", error=CheckpointError)
            raise_together(group, error, name="load open")
    raise replaced_too_often(path)


def plan_fetches(manifest: Manifest, values: Sequence[Value], rank: int) -> Iterator[Fetch]:
    """Yield the stored extents that overlap a rank's ranges, and where their parts go."""
    for value in values:
        stored = manifest.tensors.get(value.kind, {})
        for extent, in_extent, in_range in value.layout.overlaps(*value.partition.of(rank)):
            tensor = stored[extent.name]
            firsts = [one.first for one in tensor.extents]
            for one in tensor.extents[bisect_right(firsts, in_extent.start) - 1 :]:
                if one.first >= in_extent.stop:
                    break
                first, last = max(one.first, in_extent.start), min(one.first + one.numel, in_extent.stop)
                at = in_range.start + first - in_extent.start
                fetch = Fetch(value.kind, extent.name, tensor.dtype, one, first - one.first)
                if isinstance(value.mine, np.ndarray):
                    yield fetch._replace(out=value.mine[at : at + last - first])
                else:
                    yield fetch._replace(offloaded=(value.mine, at, last - first))


def _check_model(path: str, manifest: Manifest, values: Sequence[Value], *, strict: bool) -> None:
    """Raise unless the checkpoint holds the tensors that are asked for, in shapes and dtypes that can be delivered."""
    missing, reshaped, retyped = [], [], []
    asked: dict[str, set[str]] = {}
    for value in values:
        stored = manifest.tensors.get(value.kind, {})
        names = set() if value.is_partial else asked.setdefault(value.kind, set())
        for extent in value.layout.extents:
            names.add(extent.name)
            what = f"{value.kind} {extent.name!r}"
            tensor = stored.get(extent.name)
            if tensor is None:
                missing.append(what)
            elif tensor.shape != extent.shape:
                reshaped.append(f"{what} {_shape(tensor.shape)} → {_shape(extent.shape)}")
            elif not can_convert(tensor.dtype, to=value.layout.dtype):
                retyped.append(f"{what} {tensor.dtype} → {value.layout.dtype}")
    more = [
        f"{kind} {name!r}"
        for kind, names in asked.items()
        for name in manifest.tensors.get(kind, {})
        if strict and name not in names
    ]
    found = [
        _listed("missing from the checkpoint", missing),
        _listed("only in the checkpoint", more),
        _listed("of another shape (saved → asked for)", reshaped),
        _listed(f"of a dtype that does not convert ({', '.join(FLOATS)} do)", retyped),
    ]
    if any(found):
        cure = "Build the model that was saved, or name the checkpoint of this one"
        if more and not (missing or reshaped or retyped):
            cure += "; to leave tensors unread, load with strict=False"
        raise CheckpointError(
            f"Expected the checkpoint {path} to hold this model, got {'; '.join(filter(None, found))}. Nothing was "
            f"changed. {cure}. `zerort ckpt inspect --tensors {path}` lists what it holds."
        )


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _listed(title: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    rest = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {title}: {', '.join(names[:_SHOWN])}{rest}"
