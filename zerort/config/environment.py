"""Every environment variable that zerort reads, and the one place that reads them (decision 0100).

    ENVIRONMENT             sets fields of `GroupOptions`
    OFFLOAD_ENVIRONMENT     sets fields of `OffloadOptions`
    OTHERS                  all others that begin with ZERORT_
    FOREIGN                 other programs', by which something here goes

Two rooms look by themselves: `comm/bootstrap/environment.py` for what launchers leave, and `native/extension.py`, which
lies below this room, for ZERORT_NATIVE.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from zerort.config.sizes import parse_bytes
from zerort.errors import CallError

__all__ = [
    "ENVIRONMENT",
    "FOREIGN",
    "KNOWN_VARIABLES",
    "OFFLOAD_ENVIRONMENT",
    "OTHERS",
    "SCRATCH",
    "Variable",
    "given_variables",
    "options_from",
    "parse_switch",
    "read_variable",
]

T = TypeVar("T")


def parse_switch(text: str) -> bool:
    """Read a switch: 1 or 0, true or false, yes or no, on or off.

    Raises:
        CallError: It reads as neither.
    """
    switches = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in switches:
        raise CallError(f"Expected one of {', '.join(switches)}; got {text!r}.")
    return switches[text.lower()]


class Variable(NamedTuple):
    """One environment variable: which field of some options it sets, and how."""

    field: str
    """The field's name."""

    parse: Callable[[str], Any]
    """Turns the text into the field's value; raises ValueError."""

    expects: str
    """What the text has to be, as a noun phrase."""

    help: str
    """What the field does, in one line."""


_SIZE: Final = "a size such as '4MiB' or '256K'"
ENVIRONMENT: Final[Mapping[str, Variable]] = MappingProxyType(
    {
        "ZERORT_TIMEOUT": Variable("timeout", float, "seconds above 0", "how long a rank waits for the others"),
        "ZERORT_EAGER_BYTES": Variable("eager_nbytes", parse_bytes, _SIZE, "up to here, run on the caller's thread"),
        "ZERORT_STAGING_BYTES": Variable("staging_nbytes", parse_bytes, _SIZE, "one rank's slab in the node's window"),
        "ZERORT_MESSAGE_BYTES": Variable("message_nbytes", parse_bytes, _SIZE, "the largest single MPI message"),
        "ZERORT_EXCHANGE_BYTES": Variable("exchange_nbytes", parse_bytes, _SIZE, "what is held of other hosts' arrays"),
        "ZERORT_SHM_DIR": Variable("shm_dir", str, "an absolute path", "memory that the ranks of a node share"),
        "ZERORT_FLIGHT_DIR": Variable("flight_dir", str, "a path", "where flight records are dumped"),
        "ZERORT_FLIGHT_LENGTH": Variable("flight_length", int, "a count above 0", "calls a flight record remembers"),
        "ZERORT_CROSS_MEMORY": Variable("cross_memory", parse_switch, "1 or 0", "let ranks read each other's memory"),
        "ZERORT_SOCKETS": Variable("sockets", str, "auto, always or never", "TCP between hosts instead of MPI"),
        "ZERORT_FULL_TRACEBACK": Variable("full_traceback", parse_switch, "1 or 0", "show errors with all frames"),
    }
)
"""Every variable that sets a field of `GroupOptions`."""

OFFLOAD_ENVIRONMENT: Final[Mapping[str, Variable]] = MappingProxyType(
    {
        "ZERORT_OFFLOAD_CHUNK_BYTES": Variable(
            "chunk_nbytes", parse_bytes, "a size such as '8MiB'", "of each value, what streams through memory at once"
        ),
        "ZERORT_OFFLOAD_DEPTH": Variable("depth", int, "a count above 0", "chunks in memory at once"),
        "ZERORT_OFFLOAD_CHECKSUM": Variable("checksum", parse_switch, "1 or 0", "check what comes back from the disk"),
        "ZERORT_OFFLOAD_DIRECT": Variable("direct", parse_switch, "1 or 0", "go past the page cache"),
        "ZERORT_OFFLOAD_THREADS": Variable("threads", int, "a count above 0", "threads that read, and that write"),
        "ZERORT_OFFLOAD_RETRIES": Variable("retries", int, "a count", "how often EIO is tried again"),
        "ZERORT_OFFLOAD_UPDATE_ON": Variable("update_on", str, "host or device", "where updates are computed"),
    }
)
"""Every variable that sets a field of `OffloadOptions`."""

SCRATCH: Final = "ZERORT_SCRATCH"

OTHERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        SCRATCH: "the directories for offloaded values, several of them separated by colons",
        "ZERORT_NATIVE": "0: the NumPy forms of the kernels",
        "ZERORT_FAULT": "break the disk on purpose, for tests",
        "ZERORT_STACKS": "for tests: where a job that hangs writes the stacks of its threads",
        "ZERORT_JOB": "for tests: the mark by which the processes of a job are found",
    }
)
"""Every other variable of zerort's own, and what it says."""

FOREIGN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "CUPY_CACHE_IN_MEMORY": "compile kernels anew in every process, as CuPy does",
        "CUPY_CACHE_DIR": "where compiled kernels are kept, beside CuPy's",
        "CUPY_COMPILE_WITH_PTX": "part of what a compiled kernel is known by",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1: several ranks may share a GPU, from NCCL 2.30 on",
        "SLURM_JOB_ID": "names the job that holds a checkpoint's lease; so do the next three",
        "PBS_JOBID": "",
        "LSB_JOBID": "",
        "FLUX_JOB_ID": "",
        "OPENBLAS_NUM_THREADS": "noted beside the figures of a benchmark",
    }
)
"""Other programs' variables that are read here, besides launchers', and what for."""

KNOWN_VARIABLES: Final = (*ENVIRONMENT, *OFFLOAD_ENVIRONMENT, *OTHERS)
"""Every variable of zerort's own."""


def read_variable(name: str) -> str:
    """Return the text of a variable that stands in one of the tables; empty if it is not set."""
    assert name in KNOWN_VARIABLES or name in FOREIGN, name
    return os.environ.get(name, "").strip()


def given_variables() -> dict[str, str]:
    """Return all variables that begin with ZERORT_, known or not, by name."""
    return {name: text for name, text in sorted(os.environ.items()) if name.startswith("ZERORT_")}


def options_from(
    table: Mapping[str, Variable], make: Callable[..., T], overrides: Mapping[str, Any] = MappingProxyType({})
) -> T:
    """Make options from the variables of a table; one that is empty counts as not set.

    Args:
        table: `ENVIRONMENT` or `OFFLOAD_ENVIRONMENT`.
        make: The class of the options; its fields have defaults, and it proves what it is given.
        overrides: Fields by name. They win, and their variables are not read.

    Raises:
        CallError: A variable does not read as what its field takes; the message names it.
    """
    values = dict(overrides)
    for name, variable in table.items():
        text = read_variable(name)
        if not text or variable.field in overrides:
            continue
        try:
            values[variable.field] = variable.parse(text)
            make(**{variable.field: values[variable.field]})  # proves this field alone, so that its name is known
        except ValueError as error:
            raise CallError(
                f"Expected {name} to be {variable.expects}, got {text!r}. Correct or unset it. ({error})"
            ) from None
    return make(**values)
