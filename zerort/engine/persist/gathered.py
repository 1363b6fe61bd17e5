"""What ranks compute with where codes make it of differences, in checkpoints: the base of the next ones.

    saved with it      each rank reads its range, and gets the others' from them
    saved without      zeros, as at the start of a run: the next gather sends all of it

It is as much a part of a run's state as the parameters: with another base the same codes are other values
(`Wire(gather="int4", feedback=True)`, decision 0196). So is whether it was up to date: the gather of an update happens
once, before the checkpoint or after it. Next: `snapshot.py`, which has these beside parameters and state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from zerort.checkpoint import Manifest, Value
from zerort.comm import Group
from zerort.engine.model.section import Section
from zerort.engine.model.units import Units
from zerort.engine.residence.chunked_array import ChunkedArray

__all__ = ["GATHERED", "gathered_values", "spread_base", "up_to_date_names"]

GATHERED: Final = "gathered"
"""The kind of these values, and what `meta` calls the tensors that were up to date."""


def gathered_values(section: Section, rank: int, loading: Manifest | None) -> Iterator[Value]:
    """Yield this rank's range of the base that a section's differences have, if they have one.

    Args:
        section: Whose.
        rank: This one.
        loading: The checkpoint that it is loaded from, which may have it of some tensors or of none.
    """
    base = section.parameters.base
    if base is None:
        return
    names = section.names if loading is None else section.names & _saved(loading)
    if not names:
        return
    mine = base[section.partition.of(rank).slice]
    if not isinstance(mine, np.ndarray):
        mine = ChunkedArray(GATHERED, (0, mine.size), mine, device=section.parameters.array.device)
    extents = tuple(extent for extent in section.layout.extents if extent.name in names)
    layout = replace(section.layout, extents=extents)
    yield Value(kind=GATHERED, layout=layout, partition=section.partition, mine=mine, is_partial=True)


def up_to_date_names(units: Units, copies: Group | None) -> dict[str, Any]:
    """Return the tensors of which ranks compute with the last update, if that differs from the parameters.

    Args:
        units: All of them.
        copies: The ranks that hold the same range in each copy of the model, if there are several. The first one's
            base is saved, and copies may have gathered different units since the update. All of them call this.
    """
    sections = [section for section in units.sections() if section.parameters.base is not None]
    if not sections:
        return {}
    is_current = np.array([one.parameters.is_copy_current for one in sections], np.uint8)
    if copies is not None:
        is_current = copies.broadcast(is_current, root=0, name="save").wait()  # not-gpu: numbers of the host
    return {
        GATHERED: [name for one, now in zip(sections, is_current, strict=True) if now for name in sorted(one.names)]
    }


def spread_base(section: Section, group: Group, manifest: Manifest) -> None:
    """Let all ranks have a section's base, of which each has read its range, if there is one. Every rank calls this.

    Args:
        section: Whose ranges have changed, and are not gathered yet.
        group: The ranks that share the model.
        manifest: The checkpoint that was read.
    """
    base, own = section.parameters.base, section.partition.of(group.rank)
    if base is None:
        return
    saved = _saved(manifest)
    for extent, _, in_range in section.layout.overlaps(*own):
        if extent.name not in saved:
            base[own.slice][in_range].view(np.uint8).fill(0)  # bytes: CuPy 13 fills no bfloat16
    if group.size > 1:
        # gpu-wait: differences_on_gpus_go_on_from_a_checkpoint
        group.all_gather(base[own.slice], out=base, counts=section.partition.counts, name="load").wait()
    if section.names <= saved & set(manifest.meta.get(GATHERED, ())):
        section.parameters.take_current()


def _saved(manifest: Manifest) -> set[str]:
    return set(manifest.tensors.get(GATHERED, {}))
