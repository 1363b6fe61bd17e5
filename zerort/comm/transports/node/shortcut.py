"""What the native `PreparedCall` needs to know of a call, drawn up once, when the call is made for the second time.

It serves what needs no more than windows, and leaves the rest to `NodeTransport.resume` (decision 0013).
"""

from __future__ import annotations

from typing import Any

from zerort.comm.geometry import even_part
from zerort.comm.guard.call import Call
from zerort.native.dtypes import DTYPE_CODES, REDUCTION_CODES
from zerort.native.rendezvous import MOVES, prepare

__all__ = ["Place", "make_shortcut", "prepared_facts"]

Place = tuple[int, int]
"""(window, offset in bytes)"""


def prepared_facts(call: Call, *, rank: int, source: Place, out: Place, slab_nbytes: int) -> dict[str, Any]:
    """Return what every native form of a call is made from, by name, within a host and between hosts.

    Args:
        call: A call that was checked, with its arrays.
        rank: This rank in the whole group.
        source: Where the source lies; if it is staged, where this rank's slab begins.
        out: Where the out lies.
        slab_nbytes: Of half a slab if the source is staged, else 0.
    """
    return {
        "facts": (call.op, call.dtype, call.numel, call.name, call.site),
        "tail": call.tail(),
        "source": call.source,
        "out": call.out,
        "source_place": source,
        "out_place": out,
        "slab_nbytes": slab_nbytes,
        "width": 1 if call.out is None else call.out.itemsize,
        "dtype": DTYPE_CODES.get(call.dtype, 0),
        "reduction": REDUCTION_CODES.get(call.reduction, 0),
        "anywhere": slab_nbytes != 0 or (call.op == "broadcast" and call.root != rank),
        "make": call.make,
    }


def make_shortcut(
    link: Any,
    log: Any,
    call: Call,
    *,
    rank: int,
    size: int,
    source: Place,
    out: Place,
    slab_nbytes: int,
    whole_nbytes: int,
) -> Any:
    """Return the native form of ``call``; None if there is none.

    Args:
        link: The native rendezvous.
        log: Where it notes its runs.
        call: A call that was checked, with its arrays.
        rank: This rank.
        size: Ranks on the node.
        source: Where the source lies; if it is staged, where this rank's slab begins.
        out: Where the out lies.
        slab_nbytes: Of half a slab if the source is staged, else 0.
        whole_nbytes: Staged all-reduces up to this size are summed whole by every rank.
    """
    table = call.geometry
    if call.op == "all_reduce":
        move = "all_reduce"
    elif table is None:
        move = "nothing"
    else:
        move = "reduce" if table.reduces else "copy"
    return prepare(
        link,
        log,
        **prepared_facts(call, rank=rank, source=source, out=out, slab_nbytes=slab_nbytes),
        move=MOVES.index(move),
        takes=[even_part(call.numel, size, r) for r in range(size)] if table is None else table.takes,
        places=[0] * size if table is None else table.places,
        alike=table is not None and table.alike,
        whole_nbytes=whole_nbytes,
    )
