"""`Doorbell`: how a worker thread waits for work that the one that rings may well do itself.

The native form (``src/doorbell.cpp``) sleeps on a timer and so leaves a thread at work alone; this one, in Python,
serves where it was not built (decision 0015).
"""

from __future__ import annotations

import threading
import time
from typing import Any

from zerort.native.extension import kernels

__all__ = ["Doorbell", "PythonDoorbell"]


class PythonDoorbell:
    """The verbs of the native form.

    Args:
        grace: Seconds that work is left to others before the worker is woken for it.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._pending = 0
        self._rung = threading.Condition()

    def ring(self) -> None:
        """Say that there is one piece of work more."""
        with self._rung:
            self._pending += 1
            self._rung.notify()

    def answer(self) -> None:
        """Say that someone has taken a piece."""
        with self._rung:
            self._pending -= 1

    def recount(self, pending: int) -> None:
        """Say how many pieces there are, while none comes or is taken: an interrupt may have miscounted."""
        with self._rung:
            self._pending = pending

    def wait(self) -> None:
        """Sleep until there is work that nobody has taken within the grace."""
        while True:
            with self._rung:
                self._rung.wait_for(lambda: self._pending)
            time.sleep(self._grace)
            if self._pending:
                return


Doorbell: Any = PythonDoorbell if kernels is None else kernels.Doorbell
