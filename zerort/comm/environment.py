"""What started this process: which launcher, with how many ranks, and which MPI library answers to it.

The commonest way to lose a day with MPI is an ``mpirun`` of one MPI and a library of another: every process then
believes to be alone. It is found out here, before anyone computes anything. May import: mpi4py, errors.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TextIO

from zerort.errors import BootstrapError, LauncherMismatchError

__all__ = [
    "Launcher",
    "find_launcher",
    "launched_by",
    "launched_rank",
    "launched_size",
    "library_vendor",
    "load_mpi",
    "sees_terminal",
    "without_launcher",
]

# Each launcher leaves the number of ranks in a variable of its own.
_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "MPICH",
    "MV2_COMM_WORLD_SIZE": "MVAPICH",
}


_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_", "PRTE_", "MV2_COMM_", "HYDI_")
_SETTINGS = ("PRTE_MCA_",)


def without_launcher() -> dict[str, str]:
    """Return the environment less what a launcher put there: a job started from a rank must not take itself for one."""
    return {
        name: text for name, text in os.environ.items() if not name.startswith(_PREFIXES) or name.startswith(_SETTINGS)
    }


def launched_rank() -> int | None:
    """Return the number that a launcher gave this process, without loading MPI; None without a launcher."""
    return next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, "").isdecimal()), None)


def sees_terminal(file: TextIO) -> bool:
    """Say whether a person sees what is written to ``file`` on a terminal.

    Open MPI gives its ranks pseudo-terminals whatever its own output is: a pipe, or the log file of a batch job. So in
    a rank the launcher's output counts, found among the processes above this one. False where it cannot be looked at,
    as on another host than the launcher's.
    """
    if not file.isatty():
        return False
    if launched_rank() is None:
        return True
    try:
        return os.readlink(f"/proc/{_launchers_process()}/fd/{file.fileno()}").startswith(("/dev/pts/", "/dev/tty"))
    except (OSError, ValueError):
        return False


def _launchers_process() -> int:
    """Return the nearest process above this one that is no rank itself; shells may stand between."""
    process = os.getppid()
    while process > 1:
        named = {one.partition(b"=")[0].decode() for one in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")}
        if not named.intersection(_RANKS):
            return process
        status = Path(f"/proc/{process}/stat").read_text()
        process = int(status.rpartition(")")[2].split()[1])  # its name, in parentheses, may hold anything
    return process


@dataclass(frozen=True, slots=True)
class Launcher:
    """A command that starts ranks."""

    path: str
    vendor: str
    """``"MPICH"`` or ``"Open MPI"``: whose processes it can join into one world."""

    def command(self, ranks: int) -> list[str]:
        """Return the words that start ``ranks`` processes here, on however few cores and as whichever user."""
        if self.vendor != "Open MPI":
            return [self.path, "-n", str(ranks)]
        words = [self.path, "-n", str(ranks), "--oversubscribe"]
        return [*words, "--allow-run-as-root"] if os.geteuid() == 0 else words


def launched_by() -> str | None:
    """Return whose launcher started this process; None if none did."""
    return next((vendor for variable, vendor in _SIZES.items() if variable in os.environ), None)


def launched_size() -> int | None:
    """Return how many ranks the launcher started; None without a launcher."""
    sizes = [os.environ[variable] for variable in _SIZES if variable in os.environ]
    return int(sizes[0]) if sizes and sizes[0].isdigit() else None


def load_mpi() -> ModuleType | None:
    """Return ``mpi4py.MPI``, initialised; None if there is none and none is needed.

    Raises:
        BootstrapError: A launcher started several ranks, but no MPI library can be loaded.
        LauncherMismatchError: It did, but the library belongs to another MPI.
    """
    expected = launched_size() or 1
    try:
        mpi = _import_mpi(initialize=False)
    except (ImportError, RuntimeError) as error:
        if expected == 1:
            return None
        raise BootstrapError(
            f"Expected an MPI library for the {expected} ranks that {launched_by()}'s launcher started, got: {error} "
            f"Install the one that belongs to it: pip install 'zerort[{_extra(launched_by())}]'."
        ) from error
    # Looked at before MPI is initialised: under Open MPI's launcher MPICH would end the process there and then.
    if expected > 1 and _would_abort(launched_by(), library_vendor(mpi)):
        raise _mismatch(expected, library_vendor(mpi))
    mpi = _import_mpi(initialize=True)
    if expected > 1 and mpi.COMM_WORLD.Get_size() == 1:
        raise _mismatch(expected, library_vendor(mpi))
    return mpi


def _import_mpi(*, initialize: bool) -> ModuleType:
    """Import ``mpi4py.MPI``, as the user's ``mpi4py.rc`` says but for when it initialises."""
    import mpi4py

    wanted = (mpi4py.rc.initialize, mpi4py.rc.finalize)
    if "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize:
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = wanted

    if initialize and not MPI.Is_initialized():
        level = mpi4py.rc.thread_level.upper() if mpi4py.rc.threads else "SINGLE"
        MPI.Init_thread(getattr(MPI, f"THREAD_{level}"))
    return MPI


def _would_abort(launcher: str | None, library: str) -> bool:
    return launcher == "Open MPI" and library != "Open MPI"


def _mismatch(expected: int, vendor: str) -> LauncherMismatchError:
    return LauncherMismatchError(
        f"Expected a world of {expected} ranks, as {launched_by()}'s mpirun started, got {expected} worlds of one "
        f"rank: mpi4py uses {vendor}. Start with {vendor}'s mpirun (pip install {_extra(vendor)} puts it there; "
        f"now: {os.path.dirname(sys.executable)}/mpirun), or install the library of the one you use."
    )


def library_vendor(mpi: ModuleType) -> str:
    """Return whose library mpi4py uses."""
    text = mpi.Get_library_version()
    return "Open MPI" if "Open MPI" in text else "MPICH"  # Intel MPI, MVAPICH and Cray's are MPICH to their launchers


def find_launcher() -> Launcher:
    """Return the ``mpirun`` that belongs to this environment: beside its Python first, then on the PATH.

    Raises:
        BootstrapError: There is none.
    """
    beside = os.path.dirname(sys.executable)
    path = shutil.which("mpirun", path=beside) or shutil.which("mpirun")
    if path is None:
        raise BootstrapError("Expected an mpirun, got none on the PATH. Install one: pip install 'zerort[mpich]'.")
    return Launcher(path, _launcher_vendor(path))


def _launcher_vendor(path: str) -> str:
    import subprocess

    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return "Open MPI" if "Open MPI" in answer.stdout + answer.stderr else "MPICH"


def _extra(vendor: str | None) -> str:
    return "openmpi" if vendor == "Open MPI" else "mpich"
