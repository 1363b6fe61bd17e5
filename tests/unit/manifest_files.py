"""Manifests that were changed by hand, with a checksum that fits: what a stranger, or a faulty writer, may leave."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerort.checkpoint.format.manifest import FORMAT, VERSION
from zerort.native import crc32c

OTHERS: tuple[Any, ...] = (None, True, 0, -1, 1.5, 10**30, "", "x", [], [0], {}, {"x": 0})
"""What is put in the place of anything."""


def body_of(path: Path) -> dict[str, Any]:
    """Return the body of a checkpoint's manifest."""
    body: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())["body"]
    return body


def text_of(body: Any, *, version: int = VERSION) -> bytes:
    """Return a manifest with any body, and the checksum that it should have."""
    return sealed(b'"body":' + json.dumps(body).encode() + b"}\n", version=version)


def sealed(rest: bytes, *, version: int = VERSION) -> bytes:
    """Return a manifest whose text after the head is ``rest``."""

    def head(digest: int) -> bytes:
        return f'{{"format":"{FORMAT}","version":{version},"crc32c":"{digest:08x}",\n'.encode()

    return head(crc32c(rest, crc32c(head(0)))) + rest


def mutations(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value, each with one thing in it replaced, left out or doubled."""
    for path in _paths(value):
        if not path:
            yield from OTHERS
            continue
        for other in OTHERS:
            yield _changed(value, path, lambda parent, key, other=other: parent.__setitem__(key, other))
        yield _changed(value, path, lambda parent, key: parent.__delitem__(key))
        yield _changed(
            value,
            path,
            lambda parent, key: (
                parent.insert(key, parent[key]) if isinstance(parent, list) else parent.update({"x": parent[key]})
            ),
        )


def _paths(value: Any, *, so_far: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield so_far
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from _paths(one, so_far=(*so_far, key))


def _changed(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    made = copy.deepcopy(value)
    parent = made
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return made
