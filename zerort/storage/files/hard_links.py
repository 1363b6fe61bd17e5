"""`HardLinkProbe`: where files of a directory can have another name. Tried, as no number tells it.

Two places with one device number can still be two mounts, between which the kernel refuses links (bind mounts of
one disk in a container), and there are file systems without links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import warnings

from zerort.storage.files import disk
from zerort.storage.files.extents import SUFFIX

__all__ = ["TRIAL", "HardLinkProbe"]

_REFUSALS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a link says where there will never be one. Anything else may pass."""


TRIAL = ".zerort-link-"
"""How the name of a link begins that is made and deleted at once, unless the process is killed in between."""


class HardLinkProbe:
    """Which directories take second names of the files in one.

    Args:
        path: The scratch directory of the files.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._known: dict[tuple[int, int], bool] = {}  # by device and inode: a name may come to mean another place
        self._has_warned = False

    def fit_in(self, directory: str) -> bool:
        """Say whether files can have second names in a directory. Each is tried once."""
        try:
            there, here = os.stat(directory), os.stat(self._path)
        except OSError:  # not seen from here, or not there
            return False
        place = (there.st_dev, there.st_ino)
        if there.st_dev != here.st_dev:
            return False
        if place not in self._known:
            try:
                self._try(directory)
                self._known[place] = True
            except OSError as error:
                if error.errno not in _REFUSALS:  # full, perhaps
                    return False
                self._known[place] = False
                self._warn(directory, error)
        return self._known[place]

    def _try(self, directory: str) -> None:
        token = secrets.token_hex(8)
        first = os.path.join(self._path, f"{token}{SUFFIX}")
        second = os.path.join(directory, f"{TRIAL}{token}")
        try:
            os.close(disk.create(first, mode=0o600))
            disk.link(first, second)
        finally:
            for one in (second, first):
                with contextlib.suppress(OSError):  # it was not made
                    disk.unlink(one)

    def _warn(self, directory: str, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Expected links from {self._path} to {directory}, as both are on one device, got {error.strerror}: a "
                "checkpoint there is written instead. Name a directory below the same mount.",
                RuntimeWarning,
                stacklevel=4,
            )
