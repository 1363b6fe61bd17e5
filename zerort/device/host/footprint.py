"""`Footprint`: how much memory this process takes, now and at most since it was last asked.

    resident      pages of this process, as the kernel counts them         VmRSS, and at most VmHWM
    shared        those of windows and files count in parts: each of n ranks that map a page has 1/n of it (PSS)

The kernel keeps the most of resident pages only. Windows and files change little from step to step, so they are taken
off it as they are now, and their parts are added.
"""

from __future__ import annotations

import contextlib

from zerort.device.host.memory import fields_of
from zerort.errors import CallError

__all__ = ["Footprint"]

_SHARED_KINDS = ("File", "Shmem")


class Footprint:
    """The memory of this process. Reading it costs some microseconds, and milliseconds when its shared pages change."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None  # resident shared pages, of files and windows
        self._parts = 0  # this process's part of them, then

    def now_and_most(self) -> tuple[int, int]:
        """Return the bytes that this process takes now, and took at most since `restart`.

        Raises:
            CallError: The kernel does not count them.
        """
        try:
            status = dict(fields_of("/proc/self/status"))
            shared = status["RssFile"], status["RssShmem"]
            if self._seen is None or any(abs(old - new) > 1 << 20 for old, new in zip(self._seen, shared, strict=True)):
                pages = dict(fields_of("/proc/self/smaps_rollup"))
                self._seen, self._parts = shared, sum(pages[f"Pss_{kind}"] for kind in _SHARED_KINDS)
            beside = self._parts - sum(shared)
            return status["VmRSS"] + beside, max(status["VmHWM"], status["VmRSS"]) + beside
        except (OSError, KeyError) as error:
            raise CallError(
                f"Expected a kernel that counts a process's pages in /proc/self/status and smaps_rollup (Linux 5.5), "
                f"got {error}. Open the runtime without history=."
            ) from error

    def restart(self) -> None:
        """Begin anew with what is the most. Where the kernel refuses that, it stays the most of the whole process."""
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
