"""What started this process: which launcher, with how many ranks, and which MPI library answers to it.

The commonest way to lose a day with MPI is an ``mpirun`` of one MPI and a library of another, or a launcher that has
nothing to do with MPI, as ``torchrun``: every process then believes to be alone. It is found out here, before anyone
computes anything (decision 0064).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

from zerort import forks
from zerort.errors import BootstrapError, LauncherMismatchError

__all__ = [
    "ForeignStart",
    "Launcher",
    "find_launcher",
    "foreign_start",
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
_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_", "PRTE_", "MV2_COMM_", "HYDI_", "TORCHELASTIC_")
_SETTINGS = ("PRTE_MCA_",)

# What starts processes without MPI: what only it sets, where it leaves how many there are, what to call it, and what to
# do other than start with mpirun. Slurm's SLURM_NTASKS is no sign: it is set in batch scripts, too.
_FOREIGN = (
    ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "torchrun", ""),
    (
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_TASKS",
        "srun",
        "That goes into the batch script, instead of srun; where Slurm was built for it, srun --mpi={pmi} will do. ",
    ),
    ("WORLD_SIZE", "WORLD_SIZE", "whoever set WORLD_SIZE", "If nobody started several: unset WORLD_SIZE. "),
)


def without_launcher() -> dict[str, str]:
    """Return the environment less what a launcher put there: a job started from a rank must not take itself for one."""
    counts = {variable for _, variable, _, _ in _FOREIGN}
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(_SETTINGS) or not (name.startswith(_PREFIXES) or name in counts)
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


class ForeignStart(NamedTuple):
    """Several processes that something other than MPI's launchers started: to MPI each of them is alone."""

    launcher: str
    """What started them, in words."""

    variable: str
    """Where it left how many there are."""

    size: int

    otherwise: str
    """What can be done other than start them with mpirun."""

    def error(self, vendor: str | None) -> LauncherMismatchError:
        """Return what to raise where MPI sees one rank, with the command that starts them all.

        Args:
            vendor: Whose MPI library it is; None if there is none.
        """
        install = "" if vendor else "Install an MPI: pip install mpich. "
        otherwise = self.otherwise.format(pmi="pmix" if vendor == "Open MPI" else "pmi2")
        return LauncherMismatchError(
            f"Expected one world of {self.size} ranks, as {self.launcher} has it ({self.variable}={self.size}), got "
            f"{self.size} worlds of one rank, each with a model of its own: ranks find each other through MPI. "
            f"{install}Start them with mpirun:\n\n    {_as_typed(self.size, vendor)}\n\n{otherwise}"
            'To train one model in each process, on purpose: zr.open(group=zr.open_group(kind="solo")).'
        )


def foreign_start() -> ForeignStart | None:
    """Return who started several processes without MPI; None if nobody did, or if an ``mpirun`` stands in between."""
    if launched_size() is not None:
        return None
    for sign, variable, launcher, otherwise in _FOREIGN:
        text = os.environ.get(variable, "")
        if sign in os.environ and text.isdecimal() and int(text) > 1:
            return ForeignStart(launcher, variable, int(text), otherwise)
    return None


def load_mpi() -> ModuleType | None:
    """Return ``mpi4py.MPI``, initialised; None if there is none and none is needed.

    Raises:
        BootstrapError: A launcher started several ranks, but no MPI library can be loaded.
        LauncherMismatchError: It did, but the library belongs to another MPI, or the launcher to none.
    """
    expected, foreign = launched_size() or 1, foreign_start()
    try:
        mpi = _import_mpi(initialize=False)
    except (ImportError, RuntimeError) as error:
        if foreign is not None:
            raise foreign.error(None) from error
        if expected == 1:
            return None
        raise BootstrapError(
            f"Expected an MPI library for the {expected} ranks that {launched_by()}'s launcher started, got: {error} "
            f"Install the one that belongs to it: pip install {_extra(launched_by())}."
        ) from error
    # Looked at before MPI is initialised: under Open MPI's launcher MPICH would end the process there and then.
    if expected > 1 and _would_abort(launched_by(), library_vendor(mpi)):
        raise _mismatch(expected, library_vendor(mpi))
    mpi = _import_mpi(initialize=True)
    if mpi.COMM_WORLD.Get_size() == 1:
        if expected > 1:
            raise _mismatch(expected, library_vendor(mpi))
        if foreign is not None:  # and not an srun that the library understands
            raise foreign.error(library_vendor(mpi))
    return mpi


def _import_mpi(*, initialize: bool) -> ModuleType:
    """Import ``mpi4py.MPI``, as the user's ``mpi4py.rc`` says but for when it initialises."""
    import mpi4py

    wanted = (mpi4py.rc.initialize, mpi4py.rc.finalize)
    is_ours = "mpi4py.MPI" not in sys.modules and bool(mpi4py.rc.initialize)
    if is_ours:
        # mpi4py would also finalize in a forked child that ends by sys.exit: for ever, since the ranks are not there.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = wanted
    if is_ours:
        forks.at_end(lambda: _finalize(MPI))

    if initialize and not MPI.Is_initialized():
        level = mpi4py.rc.thread_level.upper() if mpi4py.rc.threads else "SINGLE"
        MPI.Init_thread(getattr(MPI, f"THREAD_{level}"))
    return MPI


def _finalize(mpi: Any) -> None:
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


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
        raise BootstrapError("Expected an mpirun, got none on the PATH. Install one: pip install mpich.")
    return Launcher(path, _launcher_vendor(path))


def _as_typed(ranks: int, vendor: str | None) -> str:
    """Return the line that starts this program on ``ranks`` ranks."""
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    typed = shutil.which("mpirun")
    path = "mpirun" if beside is None or (typed and os.path.samefile(typed, beside)) else beside
    words = [word for word in sys.orig_argv[1:] if word != "-u"]  # torchrun's own
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    return shlex.join([*Launcher(path, vendor or "MPICH").command(ranks), python, *words])


def _launcher_vendor(path: str) -> str:
    import subprocess

    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return "Open MPI" if "Open MPI" in answer.stdout + answer.stderr else "MPICH"


def _extra(vendor: str | None) -> str:
    return "openmpi" if vendor == "Open MPI" else "mpich"
