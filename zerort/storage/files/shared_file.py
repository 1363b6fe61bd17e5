"""`SharedFile`: a file that is open while somebody works on it, once for all who do at the same time.

Opening, looking at and closing a file are system calls, each of which lets go of the interpreter and waits for it
again. Done by every worker of every operation, they left a disk idle for a tenth of a millisecond between two blocks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from zerort.storage.files.blocks import BlockFile

__all__ = ["SharedFile"]


class SharedFile:
    """One way to open a file.

    Args:
        open_file: Opens it.
    """

    def __init__(self, open_file: Callable[[], BlockFile]) -> None:
        self._open_file = open_file
        self._file: BlockFile | None = None
        self._users = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def opened(self) -> Iterator[BlockFile]:
        """Give the file, open; the first who comes opens it, and the last who leaves closes it.

        Raises:
            StorageError: It could not be opened. Whoever comes next tries again.
        """
        with self._lock:
            if self._file is None:
                self._file = self._open_file()
            file = self._file
            self._users += 1
        try:
            yield file
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._file = None
                    file.close()
