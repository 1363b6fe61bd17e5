"""Every error zerort raises by name, and nothing else.

    ZerortError
    ├── CallError (ValueError)            a verb got an argument it cannot work with; the same on every rank
    ├── ClosedError                       a verb of something that was closed
    ├── ForkedError                       a verb of something that a forked child has inherited
    ├── BootstrapError                    a group could not be opened
    │   ├── LauncherMismatchError         started by another MPI's mpirun, or by torchrun: N singletons
    │   └── SharedMemoryError             /dev/shm too small, or not shared between the ranks
    ├── DeviceError                       a GPU that cannot be used: no CuPy, no driver, too few, or a fault
    │   └── DeviceMemoryError (MemoryError)  a GPU that has not that much memory left
    ├── CollectiveError                   ranks did not do the same thing
    │   ├── CollectiveMismatchError       they arrived with different calls
    │   ├── CollectiveTimeoutError        one of them did not arrive in time
    │   └── RankFailedError               one of them left, died or raised while the others waited
    ├── PlanError (ValueError)            a plan that no placement table can serve, or not the same on every rank
    ├── UnitStateError                    verbs in an order that makes no sense: gathered twice, a step without a reduce
    ├── StaleViewError                    a view used after its unit was released
    ├── NonFiniteError (ArithmeticError)  a gradient with NaN or infinity; nothing was updated
    ├── StopRequested                     a step after the one whose report said that the run is to stop
    ├── StorageError                      the file system refused: full, read-only, unreadable
    │   └── CorruptStorageError           bytes that sleep on a disk are not those that were written
    └── CheckpointError                   a checkpoint that cannot be used: of another model, or of another format
        ├── CorruptCheckpointError        its bytes are not those that were written
        └── CheckpointInUseError          somebody else saves in that directory

Messages read ``Expected X, got Y.`` and then the cure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "BootstrapError",
    "CallError",
    "CheckpointError",
    "CheckpointInUseError",
    "ClosedError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CorruptCheckpointError",
    "CorruptStorageError",
    "DeviceError",
    "DeviceMemoryError",
    "ForkedError",
    "LauncherMismatchError",
    "NonFiniteError",
    "PlanError",
    "RankFailedError",
    "SharedMemoryError",
    "StaleViewError",
    "StopRequested",
    "StorageError",
    "UnitStateError",
    "ZerortError",
]


class ZerortError(Exception):
    """The root of every error that zerort raises by name."""


class CallError(ZerortError, ValueError):
    """A verb got an argument that it cannot work with. In a group, every rank raises it with the same text."""

    parts: Sequence[Mapping[str, int]] = ()
    """Where ranks have met with it: how many calls each of them had made in groups that were split from theirs."""


class ClosedError(ZerortError, RuntimeError):
    """A verb was called on something that is closed."""


class ForkedError(ZerortError, RuntimeError):
    """A forked child used a runtime, group or store of its parent. It may open its own, or end."""


class BootstrapError(ZerortError, RuntimeError):
    """A group could not be opened; every rank that takes part raises it."""


class LauncherMismatchError(BootstrapError):
    """The launcher started several processes, but the MPI library sees each of them as a world of one."""


class SharedMemoryError(BootstrapError):
    """Memory shared by the ranks of a node could not be had."""


class DeviceError(ZerortError, RuntimeError):
    """A GPU cannot be used; the message says what is missing."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A GPU, or a host for this process, has not that much memory left; the message has the numbers."""


class CollectiveError(ZerortError, RuntimeError):
    """The ranks of a group did not do the same thing."""


class CollectiveMismatchError(CollectiveError):
    """Ranks arrived at one collective with different calls. All of them raise this; the group stays usable."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not arrive within the timeout. The ranks that waited raise this; the group is broken."""


class RankFailedError(CollectiveError):
    """A rank left the group, died or raised while others waited for it. The group is broken."""

    story = ""
    """Who left, and when, in one line: the message's last one. Empty if nobody left."""
    exit_code = 1
    """The code with which the rank left, if it said so (``sys.exit(3)``): the job ends with it."""


class PlanError(ZerortError, ValueError):
    """A plan asks for what the placement table does not hold, or is not the same on every rank."""


class UnitStateError(ZerortError, RuntimeError):
    """A verb was called in an order that makes no sense; the message names the one that comes first."""


class StaleViewError(ZerortError, RuntimeError):
    """A view of a parameter was used after its unit was released: the memory may hold something else by now."""


class NonFiniteError(ZerortError, ArithmeticError):
    """A gradient holds NaN or infinity. Every rank raises this, and no parameter was changed."""


class StopRequested(ZerortError, RuntimeError):
    """A step was asked for after one whose report said that the run is to stop; on every rank, and nothing changed."""


class StorageError(ZerortError, RuntimeError):
    """The file system refused to write or to read; the message names the file and the cure."""

    is_stuck = False
    """Whether it does not answer at all: whoever asks it for anything more may wait for ever."""


class CorruptStorageError(StorageError):
    """Bytes that were put on a disk came back different, or not at all; the message names file, offset and rank."""


class CheckpointError(ZerortError, RuntimeError):
    """A checkpoint cannot be used as it is; the message says what differs."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's bytes are not those that were written."""


class CheckpointInUseError(CheckpointError):
    """Somebody else saves in that directory; the message says who, since when. What is saved there is intact."""
