"""`Lease`: one saver at a time in a directory. Whoever comes second is told who the first is, and destroys nothing.

    saver.lease     who saves here: host, process, job, since when, and a token that no other saver has. Its owner
                    holds the file's lock (flock), and touches it every 10 s

    hold            lock that file and put our token into it, if its owner is gone or there is none
    check           is our token still there? The fence before a manifest counts: a saver that was taken for dead, and
                    is not, stops here
    release         delete it

An owner on this machine is gone when the kernel has dropped its lock: a kill -9 holds nobody up. One elsewhere is gone
if its lock can be had and it has given no sign of life for 60 s; so is any, where the file system has no locks. What a
save will delete is listed before the fence, so a successor's files are never among it (decision 0069).
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from typing import Final, NamedTuple

from zerort import forks
from zerort.checkpoint.format.schema import COUNT, expect
from zerort.config.environment import read_variable
from zerort.errors import CheckpointInUseError
from zerort.storage.files import disk
from zerort.storage.files.activity import on_disk
from zerort.storage.files.owners import Owner, is_dead, this_owner
from zerort.storage.files.workers import lend

__all__ = ["LEASE", "LEASE_SECONDS", "Lease"]

LEASE: Final = "saver.lease"
LEASE_SECONDS: Final = 60.0
"""How long an owner on another host may be silent before it is taken for gone."""

_BEAT_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.2
_WRITE_SECONDS: Final = 2.0
"""How long one that has the lock may take to write who it is."""
_FORK_SECONDS: Final = 5.0
"""How long a child that was just forked may take to close its copy of a dead owner's lock."""
_RELEASE_SECONDS: Final = 5.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


class _Holder(NamedTuple):
    """Who has a lease, as the file says."""

    token: str
    owner: Owner
    name: str
    """The host's name."""
    job: str
    since: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether the kernel of this machine knows nothing of it."""
        return self.owner.boot != this_owner().boot

    @property
    def is_here(self) -> bool:
        """Whether it is this process."""
        return self.owner == this_owner()

    def __str__(self) -> str:
        own = ", which is this process" if self.is_here else ""
        return f"process {self.owner.pid} on {self.name} ({self.job}), since {self.since}{own}"


class Lease:
    """The right to save in a directory. Held by one process; a forked child does not have it.

    Args:
        directory: Where.
        verb: What the right is for, in errors.
    """

    def __init__(self, directory: str, *, verb: str = "save") -> None:
        self.directory = directory
        self._verb = verb
        self._path = os.path.join(directory, LEASE)
        self._token = secrets.token_hex(8)
        self._guard = threading.Lock()
        self._descriptor = -1
        self._was_taken = False  # and not released since
        self._knows_locks = True  # as far as the file system has shown
        self._released = threading.Event()
        forks.follow(self)

    @property
    def is_held(self) -> bool:
        """Whether it is this object's, still."""
        holder = None if self._descriptor < 0 else self._read()
        return holder is not None and holder.token == self._token

    @property
    def is_lost(self) -> bool:
        """Whether it was this object's, and somebody has taken it over: what is saved there now is theirs."""
        return self._was_taken and not self.is_held

    def hold(self, *, patience: float = 0.0, anew: bool = False) -> None:
        """Have the lease from here on.

        Args:
            patience: How many seconds to wait for a sign of life of an owner on another host.
            anew: Whether one that was lost may be taken again: its owner goes on with what is saved there by now.

        Raises:
            CheckpointInUseError: Somebody else has it, or had it since it was lost.
            OSError: The file system refused.
        """
        if self.is_held:
            return
        if self._was_taken and not anew:
            raise self._in_use(self._read())
        self._let_go()
        began = time.monotonic()
        while not self._take():
            holder, waited = self._read(), time.monotonic() - began
            if holder is None:  # somebody is about to write who it is
                may_change = waited < _WRITE_SECONDS
            elif not self._ends_by_silence(holder) and is_dead(holder.owner):  # a child of its own has not begun to run
                may_change = waited < _FORK_SECONDS
            else:  # no sign of life since we look, as far as clocks tell
                may_change = self._ends_by_silence(holder) and waited < patience and self._silence() > waited - 1.0
            if not may_change:
                raise self._in_use(holder)
            time.sleep(_LOOK_SECONDS)
        self._was_taken = True
        self._released = threading.Event()
        beat = threading.Thread(target=self._beat, args=(self._released,), name="checkpoint lease", daemon=True)
        beat.start()

    def check(self) -> None:
        """Raise unless the lease is still ours: from here on a save may count.

        Raises:
            CheckpointInUseError: Somebody has taken it over.
        """
        if not self.is_held:
            raise self._in_use(self._read())

    def release(self) -> None:
        """Let others save. Releasing twice is fine, and so is one that was lost.

        A disk that does not answer is not waited for: then the lease ends when it answers, or with the process.
        """
        self._was_taken = False
        if self._descriptor >= 0 and not self._released.is_set():
            self._released.set()
            lend(self._delete).wait(_RELEASE_SECONDS)

    def _delete(self) -> None:
        with contextlib.suppress(OSError):
            if self.is_held:
                disk.unlink(self._path)
        self._let_go()

    def _take(self) -> bool:
        """Write our token into the file, and say whether that was possible."""
        while True:
            is_new = True
            try:
                descriptor = disk.create(self._path)
            except FileExistsError:
                is_new = False
                try:
                    descriptor = disk.open_regular(self._path, os.O_RDWR)
                except FileNotFoundError:
                    continue  # released meanwhile
            try:
                locked = _lock(descriptor)
                self._knows_locks = locked is not None
                if not _is_at(descriptor, self._path):
                    continue  # released meanwhile
                if locked is False:
                    return False
                if not is_new and not self._is_free(_parse(descriptor)):
                    return False
                self._sign(descriptor)
                self._descriptor, descriptor = descriptor, -1
                return True
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def _sign(self, descriptor: int) -> None:
        try:
            os.ftruncate(descriptor, 0)
            disk.write(descriptor, self._text(), path=self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.unlink(self._path)
            raise

    def _is_free(self, holder: _Holder | None) -> bool:
        """Say whether nobody has the lease any more. Where there are locks, its lock is ours."""
        if holder is None:  # it died before it could write, or the machine did
            return self._knows_locks or self._silence() > LEASE_SECONDS
        if not self._ends_by_silence(holder):
            return True
        return (not holder.is_elsewhere and is_dead(holder.owner)) or self._silence() > LEASE_SECONDS

    def _ends_by_silence(self, holder: _Holder) -> bool:
        """Say whether only its silence tells that an owner is gone.

        That is so on another machine. Without locks it is so on this one, too: an owner in another container, which
        has other process numbers, cannot be asked for.
        """
        return holder.is_elsewhere or not self._knows_locks

    def _silence(self) -> float:
        """Return the seconds since the last sign of life, by the clock that sets the times of files there."""
        probe = f"{self._path}.{secrets.token_hex(8)}.tmp"
        os.close(disk.create(probe))
        try:
            return os.stat(probe).st_mtime - os.stat(self._path).st_mtime
        except FileNotFoundError:
            return math.inf  # released meanwhile
        finally:
            with contextlib.suppress(OSError):
                disk.unlink(probe)

    def _text(self) -> bytes:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        return json.dumps([self._token, this_owner(), socket.gethostname(), _job(), now]).encode()

    def _read(self) -> _Holder | None:
        try:
            descriptor = disk.open_regular(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            with on_disk("read", self._path):
                return _parse(descriptor)
        finally:
            os.close(descriptor)

    def _beat(self, released: threading.Event) -> None:
        while not released.wait(_BEAT_SECONDS):
            with self._guard, contextlib.suppress(OSError):
                if self._descriptor >= 0 and not released.is_set():
                    os.utime(self._descriptor)

    def _let_go(self) -> None:
        self._released.set()
        with self._guard:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def disown(self) -> None:
        """In a forked child: be a lease that was never held. Its owner's lock must not live as long as the child."""
        self._guard, self._released = threading.Lock(), threading.Event()  # the owner's thread may have had their locks
        self._was_taken = False
        self._let_go()

    def _in_use(self, holder: _Holder | None) -> CheckpointInUseError:
        cure = "Let it end, or name another directory"
        if holder is not None and holder.is_here:
            cure = "Close the feed or runtime that has it first, or name another directory"
        if self._was_taken:
            cure = "This run was taken for gone: let the other end and load what it saved, or name another directory"
        if holder is not None and self._ends_by_silence(holder):
            cure += f". If it is gone already, its lease ends by itself: start again in {LEASE_SECONDS:.0f} s"
        return CheckpointInUseError(
            f"Expected nobody else to {self._verb} in {self.directory}, got {holder or 'another that took it over'}. "
            f"Nothing was changed there. {cure}."
        )


def _parse(descriptor: int) -> _Holder | None:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        expect(found, (str, (str, str, COUNT, COUNT), str, str, str), at="lease")
        token, owner, name, job, since = found
        return _Holder(token, Owner(*owner), name, job, since)
    except (ValueError, RecursionError):
        return None


def _lock(descriptor: int) -> bool | None:
    """Lock a file and say whether that was possible; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _is_at(descriptor: int, path: str) -> bool:
    mine = os.fstat(descriptor)
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _job() -> str:
    named = next((f"job {text}" for one in _JOBS if (text := read_variable(one))), "")
    return named or os.path.basename(sys.argv[0]) or "python"
