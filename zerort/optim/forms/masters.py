"""`MasterForm`: in which form the float32 master weights of 16-bit parameters are kept; the forms there are.

    form         kept beside the parameter     bytes     parameters
    float32      the master                    4         what masters round to: an update need not read them
    remainder    its lower 16 bits             2         bfloat16, the upper half of the master

Both give the same bits: masters are rounded half away from zero in both (decision 0130).
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from zerort.errors import CallError
from zerort.optim.kernels import kernels_for
from zerort.optim.optimizer import Optimizer

__all__ = ["MASTERS", "MasterForm", "master_form"]


class MasterForm(abc.ABC):
    """How master weights are kept. Arrays are 1-D, of one length and one device."""

    __slots__ = ()

    dtype: str
    """Of what is kept beside the parameter."""
    reads_parameter: bool
    """Whether parameters are a part of the masters: an update reads them, too."""
    parameters: tuple[str, ...]
    """Dtypes of the parameters that can have it."""

    @abc.abstractmethod
    def take(self, kept: Any, param: Any) -> None:
        """Set the masters to the parameters' values."""


class _Float32(MasterForm):
    __slots__ = ()
    dtype = "float32"
    reads_parameter = False
    parameters = ("bfloat16", "float16")

    def take(self, kept: Any, param: Any) -> None:
        kernels_for(kept).cast_into(kept, param)


class _Remainder(MasterForm):
    __slots__ = ()
    dtype = "uint16"
    reads_parameter = True
    parameters = ("bfloat16",)

    def take(self, kept: Any, param: Any) -> None:
        kept.fill(0)


MASTERS: Final[Mapping[str, MasterForm]] = MappingProxyType({"float32": _Float32(), "remainder": _Remainder()})
"""All forms by name."""


def master_form(optimizer: Optimizer, dtype: str, *, name: str) -> MasterForm | None:
    """Return the form of the master weights of a parameter, or None if it has none.

    Args:
        optimizer: What updates it.
        dtype: The parameter's.
        name: Its full name, for the error.

    Raises:
        CallError: Parameters of this dtype cannot have the optimizer's form.
    """
    form = MASTERS[optimizer.master_name]
    if dtype in form.parameters:
        return form
    if optimizer.master_name == "float32":
        return None
    raise CallError(
        f"Expected parameters in {' or '.join(form.parameters)} with master={optimizer.master_name!r} of "
        f"{optimizer.kind}, got {name!r} in {dtype}. Convert it, or keep whole masters where there are any: "
        f"zr.ParameterGroup({name!r}, master='float32')."
    )
