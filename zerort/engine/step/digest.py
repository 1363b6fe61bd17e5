"""`digest_of`: one checksum of all parameters, to compare runs with."""

from __future__ import annotations

from zerort import native
from zerort.comm.agreed import agreed, gather_json
from zerort.engine.context import Context
from zerort.engine.model.units import Units
from zerort.errors import StorageError

__all__ = ["digest_of"]


def digest_of(context: Context, units: Units) -> str:
    """Return a checksum of all parameters, the same for any number of ranks and any plan. Every rank calls this."""
    sections = list(units.sections())
    mine: list[tuple[int, int]] = []
    context.staging.finish()  # gpu-wait: a_digest_is_of_what_was_written
    for section in sections:
        # gpu-wait: a_digest_is_of_what_was_written
        section.parameters.wait()  # a gather in place may write to this rank's range, too: the same values
    with agreed(context.world, "digest", catching=StorageError):
        mine = [section.checksum() for section in sections]
        context.update_stream.check_written()  # else what was read may be what was there before a write that failed
    total = 0
    everyone = gather_json(context.mesh.shard, mine, name="digest")
    for index in range(len(sections)):
        for rank in everyone:
            value, nbytes = rank[index]
            total = native.crc32c_combine(total, value, nbytes)
    return f"{total:08x}"
