"""A disk that loses power: everything done to it is written down, and cut off after any operation.

What was synced is there afterwards. Of what was not, anything may be there or not, in any combination: a byte range of
a file, a name, a deletion. `DiskLog.states` yields directories as a restart may find them.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_DIRECTORY = -1

SUBSETS = 32
"""Seeded combinations of what was lost, per prefix."""


@dataclass(slots=True)
class Operation:
    """One change of the disk: of the bytes of a file, or of names; or a sync, or a mark of the test's own."""

    kind: str
    path: str = ""
    file: int = -1
    """Whose bytes it changes."""
    offset: int = 0
    data: bytes = b""
    size: int = 0
    names: list[tuple[str, int | None]] = field(default_factory=list)
    """Names that it sets, and the file that each then means; None: it is gone."""

    @property
    def is_change(self) -> bool:
        """Whether it may be lost."""
        return self.kind in ("write", "reserve") or bool(self.names)

    def is_kept_by(self, sync: Operation) -> bool:
        """Say whether a later operation puts it on the disk for good."""
        if sync.kind == "sync":
            return self.file == sync.file and not self.names
        return sync.kind == "syncdir" and bool(self.names) and os.path.dirname(self.names[-1][0]) == sync.path


class DiskLog:
    """Everything that a process did to files, in its order."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._files: dict[str, int] = {}
        self._ends: dict[int, int] = {}
        self._lock = threading.Lock()
        self._count = 0

    def watch(self, kind: str, path: str, *more: Any) -> None:
        """Write an operation down; for `disk.watched`."""
        with self._lock:
            self.operations.append(self._named(kind, path, *more))

    def mark(self, what: int) -> None:
        """Write down that the test has come so far."""
        with self._lock:
            self.operations.append(Operation("mark", size=what))

    def _named(self, kind: str, path: str, *more: Any) -> Operation:
        if kind == "create":
            self._count += 1
            self._files[path] = self._count
            return Operation(kind, path, names=[(path, self._count)])
        if kind in ("mkdir", "rmdir"):
            return Operation(kind, path, names=[(path, _DIRECTORY if kind == "mkdir" else None)])
        if kind == "link":
            self._files[more[0]] = self._files[path]
            return Operation(kind, path, names=[(more[0], self._files[path])])
        if kind == "rename":
            self._files[more[0]] = file = self._files.pop(path)
            return Operation(kind, path, names=[(path, None), (more[0], file)])
        if kind == "unlink":
            self._files.pop(path)
            return Operation(kind, path, names=[(path, None)])
        if kind == "syncdir":
            return Operation(kind, path)
        file = self._files[path]
        if kind == "append":
            at = self._ends.get(file, 0)
            self._ends[file] = at + len(more[0])
            return Operation("write", path, file, at, more[0])
        if kind == "write":
            return Operation(kind, path, file, more[0], bytes(more[1]))
        if kind == "reserve":
            return Operation(kind, path, file, size=more[0])
        assert kind == "sync", kind
        return Operation(kind, path, file)

    def states(self, directory: str, *, stride: int = 1, seed: int = 0) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yield how far the marks had come, and what a restart may find in a directory; nothing twice.

        Args:
            directory: Where to look.
            stride: Cut off after every so many operations.
            seed: For the combinations.
        """
        chance = random.Random(seed)
        seen: set[tuple[int, int]] = set()
        for end in range(0, len(self.operations) + 1, stride):
            prefix = self.operations[:end]
            mark = max((one.size for one in prefix if one.kind == "mark"), default=0)
            loose = [
                at
                for at, one in enumerate(prefix)
                if one.is_change and not any(one.is_kept_by(later) for later in prefix[at + 1 :])
            ]
            lost: list[set[int]] = [set(), set(loose), *({at} for at in loose)]
            lost += [{at for at in loose if chance.random() < 0.5} for _ in range(SUBSETS if loose else 0)]
            for drop in lost:
                state = _state(prefix, drop, directory)
                key = (mark, hash(frozenset(state.items())))
                if key not in seen:
                    seen.add(key)
                    yield mark, state


def _state(prefix: list[Operation], lost: set[int], directory: str) -> dict[str, bytes]:
    names: dict[str, int] = {}
    for at, one in enumerate(prefix):
        if at in lost and one.kind == "mkdir" and f"{directory}/".startswith(f"{one.path}/"):
            return {}  # nor is what was put there
        for name, file in one.names if at not in lost else ():
            if os.path.dirname(name) == directory:
                names.pop(name, None)
                if file is not None:
                    names[name] = file
    files = {file: bytearray() for file in names.values()}
    for at, one in enumerate(prefix):
        if one.kind in ("write", "reserve") and one.file in files and at not in lost:
            content = files[one.file]
            content.extend(bytes(max(0, max(one.size, one.offset + len(one.data)) - len(content))))
            content[one.offset : one.offset + len(one.data)] = one.data
    return {os.path.basename(name): bytes(files[file]) for name, file in names.items()}


def put(directory: str, state: dict[str, bytes]) -> None:
    """Make a directory what a restart finds."""
    os.makedirs(directory, exist_ok=True)
    for name in set(os.listdir(directory)) - set(state):
        os.unlink(os.path.join(directory, name))
    for name, content in state.items():
        with open(os.path.join(directory, name), "wb") as file:
            file.write(content)
