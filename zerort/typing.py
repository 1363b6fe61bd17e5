"""The protocols that the rooms share: what a device, a stream and an event must be able to do.

They are structural: the host fulfils them with NumPy and threads, a GPU with CuPy. The
contract suites in `zerort.testing` say what an implementation must hold beyond its signatures. Values of packages that
need not be installed are told apart here, too (`is_on_gpu`, `loaded_class`, `type_name`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy.typing as npt

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Array",
    "Device",
    "DtypeLike",
    "Event",
    "HostMemorySource",
    "Memory",
    "Stream",
    "is_on_gpu",
    "loaded_class",
    "type_name",
]

Array = npt.NDArray[Any]
DtypeLike = npt.DTypeLike

T = TypeVar("T")


def is_on_gpu(array: object) -> bool:
    """Say whether an array, NumPy's or CuPy's, lies on a GPU: whether its class has CUDA's array interface.

    >>> import numpy as np
    >>> is_on_gpu(np.zeros(3))
    False
    """
    return hasattr(type(array), "__cuda_array_interface__")  # of its class: an array's own would look at streams


class _NotLoaded:
    """The class of nothing."""


def loaded_class(module: str, name: str) -> type:
    """Return a class of a module that somebody has imported; if nobody has, a class without instances.

    >>> isinstance(1.5, loaded_class("builtins", "float")), isinstance(1.5, loaded_class("nobody.has.this", "Tensor"))
    (True, False)
    """
    found: type = getattr(sys.modules.get(module), name, _NotLoaded)
    return found


def type_name(value: object) -> str:
    """Return the class of a value as errors name it: with its module, unless it is one of Python's own.

    >>> import numpy as np
    >>> type_name(np.zeros(3)), type_name([1])
    ('numpy.ndarray', 'list')
    """
    return inspect.formatannotation(type(value))


class Memory(Protocol):
    """Where arrays come from: a device's own memory, or memory that somebody set aside."""

    def empty(self, numel: int, dtype: DtypeLike, *, alignment: int = ...) -> Any:
        """Return a 1-D array whose first byte stands at a multiple of ``alignment`` bytes."""


class HostMemorySource(Protocol):
    """Where host memory comes from that a GPU copies from and to: all ranks pin it, or none."""

    def zeros(self, numel: int, dtype: DtypeLike) -> Any:
        """Return a 1-D array of zeros that starts on a page. Every rank calls this; ``numel`` may differ."""

    def free(self, array: Any) -> None:
        """Let go of an array from here, as it came: no copy is under way. It stays readable."""


class Reserve(Protocol):
    """Addresses for a 1-D array, of which the ranges in use alone have memory."""

    def take(self, first: int, last: int) -> Any:
        """Return the elements from ``first`` to ``last``: with the values that are there, else zeros."""

    def give_back(self, first: int, last: int, *, keep: tuple[int, int]) -> None:
        """Let the memory of some elements go, except for pages on which there are some of ``keep``."""


class Event(Protocol):
    """A point in a stream's work that has been reached, or will be."""

    def done(self) -> bool:
        """Say whether the point has been reached, without waiting."""

    def wait(self, timeout: float | None = None) -> None:
        """Block the host until the point is reached; raise what the work before it raised."""


class Stream(Protocol):
    """Work that happens in the order in which it was submitted, while the caller goes on."""

    name: str

    def submit(
        self, work: Callable[[], T], *, name: str = ..., keep: tuple[object, ...] = ..., eager: bool = ...
    ) -> Any:
        """Queue ``work`` and return its Ticket."""

    def after(self, ticket: Any) -> Any:
        """Make what is submitted next wait for ``ticket``, and return the Ticket of that wait."""

    def synchronize(self) -> None:
        """Block the host until everything submitted so far has happened."""

    def close(self) -> None:
        """Finish what was submitted, then refuse further work."""


class Device(Protocol):
    """Memory of one kind, and the streams that work on it."""

    name: str
    arrays: str
    """What errors call an array of its own."""
    in_host_memory: bool
    """Whether host code reads and writes its arrays, so that nothing has to be staged or pinned for it."""

    def empty(self, numel: int, dtype: DtypeLike, *, alignment: int = ...) -> Any:
        """Return a 1-D array whose first byte stands at a multiple of ``alignment`` bytes."""

    def copy(self, source: Any, *, out: Any, stream: Stream | None = None) -> Any:
        """Copy ``source`` into ``out`` on ``stream`` and return the Ticket."""

    def stream(self, name: str) -> Stream:
        """Return a new stream of this device."""

    def named_stream(self, name: str) -> Stream:
        """Return the device's own stream for one kind of work, such as ``"copy in"``; always the same one."""

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of its memory."""

    def owns(self, array: Any) -> bool:
        """Say whether ``array`` lies in this device's memory."""

    def scratch(self, numel: int, dtype: DtypeLike) -> Any:
        """Return a 1-D array that comes and goes with a step: cheap to make, also where `empty` is not."""

    def zeros(self, numel: int, dtype: DtypeLike) -> Any:
        """Return a 1-D array of zeros, as `empty` aligns it."""

    def reserve(self, numel: int, dtype: DtypeLike) -> Reserve | None:
        """Return addresses for an array of which ranges come into use one after the other; None: it has none."""

    def flat(self, array: Any) -> Any:
        """Return an array of this device as 1-D and contiguous: where it lies, or a copy if it must be."""

    def put(self, source: Any, *, out: Any) -> None:
        """Copy ``source``, of the host or of this device, into ``out`` of this device: the caller may use both then."""

    def fetch(self, array: Any) -> Array:
        """Return an array of this device, or of the host, as the host sees it: itself, or a copy."""

    def order_after(self, ticket: Any) -> Any:
        """Return a Ticket's result, which is there for what the caller does next on this device."""

    def synchronize(self) -> None:
        """Wait until what the caller has launched on this device is done: other threads may look at it then."""

    def close(self) -> None:
        """Close every stream of this device."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
