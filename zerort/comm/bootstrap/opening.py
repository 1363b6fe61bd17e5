"""Open a group: find out where the ranks are, pick what carries their bytes best, and fail together if that fails.

    one rank                                solo
    all ranks on one machine                node           shared memory; mpi without native kernels, but on x86-64
    one rank on each machine                mpi
    several ranks on several machines       hierarchical   shared memory within, MPI between
    asked for                               nccl           GPUs, on top of one of these

Ranks exchange value-or-error before anything is built, so an error on one is the same error on all.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerort import native
from zerort.comm.bootstrap.environment import load_mpi
from zerort.comm.bootstrap.leftovers import sweep
from zerort.comm.group import Group
from zerort.comm.guard.failure import abort_job_on_exception, end_job
from zerort.comm.neighbours import can_open_each_other, see_each_other, share_cores
from zerort.comm.transport import Transport
from zerort.comm.transports.nccl.opening import open_on_gpus
from zerort.comm.transports.node.meeting import open_control
from zerort.comm.transports.node.transport import NodeTransport
from zerort.comm.transports.solo import SoloTransport
from zerort.config import GroupOptions
from zerort.errors import BootstrapError, CallError, SharedMemoryError

if TYPE_CHECKING:
    from mpi4py import MPI

    from zerort.device.cuda.device import CudaDevice

__all__ = ["KINDS", "best_transport", "open_group", "open_node"]

KINDS = ("solo", "node", "mpi", "hierarchical", "nccl")
"""What `open_group` can be asked for by name."""

_STORES_IN_ORDER = ("x86_64", "AMD64", "i686")
"""Machines on which a store is seen by other cores before the next one."""

_WIDEST_NBYTES = 32
"""Of an element: NumPy has none wider than a complex long double."""


def open_group(
    comm: MPI.Intracomm | None = None,
    *,
    kind: str | None = None,
    name: str = "world",
    options: GroupOptions | None = None,
    device: CudaDevice | None = None,
) -> Group:
    """Open the group of all ranks of ``comm``, over the best there is between them. Every rank calls this.

    Args:
        comm: Whose ranks; all ranks that ``mpirun`` started if None. It is duplicated, never used itself.
        kind: One of `KINDS`, to insist on it; None picks by where the ranks are.
        name: What errors and traces call the group.
        options: Timeouts and sizes; from the environment (`zerort.config.ENVIRONMENT`) if None.
        device: This rank's GPU, for kind ``"nccl"``; one per rank of a machine, in rank order, if None.

    Raises:
        BootstrapError: The group cannot be opened; the same error on every rank.
        DeviceError: A rank has no GPU of its own; the same error on every rank.
        LauncherMismatchError: ``mpirun`` belongs to another MPI than the library, or ``torchrun``, ``srun`` or whatever
            set ``WORLD_SIZE`` started several processes that MPI does not know of. Kind ``"solo"`` is for those, too.

    Without ``mpirun`` this is a group of one:

    >>> with open_group() as group:
    ...     group.rank, group.size
    (0, 1)
    """
    if kind is not None and kind not in KINDS:
        raise CallError(f"Expected a kind of {', '.join(KINDS)}, got {kind!r}.")
    if comm is not None and not hasattr(comm, "Get_size"):
        raise CallError(
            f"Expected comm to be a communicator of mpi4py's such as MPI.COMM_WORLD, got {comm!r}. A kind is named: "
            "zr.open_group(kind=…)."
        )
    if not isinstance(options, (GroupOptions, type(None))):
        raise CallError(f"Expected options to be GroupOptions such as zr.GroupOptions(timeout=60.0), got {options!r}.")
    if device is not None and kind != "nccl":
        raise CallError(f"Expected device= with kind='nccl' only, got kind={kind!r} and device={device!r}.")
    options = GroupOptions.from_environment() if options is None else options
    if kind == "solo" and (comm is None or comm.Get_size() == 1):
        return Group(SoloTransport(name=name, options=options))
    mpi = load_mpi()
    if mpi is None:
        alone: Transport = SoloTransport(name=name, options=options)
        return Group(open_on_gpus(alone, local_rank=0, hosts=[0], device=device) if kind == "nccl" else alone)
    world = mpi.COMM_WORLD if comm is None else comm
    return Group(best_transport(world, name=name, options=options, kind=kind, device=device))


def best_transport(
    comm: MPI.Intracomm,
    *,
    name: str,
    options: GroupOptions,
    kind: str | None = None,
    machine: MPI.Intracomm | None = None,
    device: CudaDevice | None = None,
) -> Transport:
    """Return the transport of the given kind, or the best one, for the ranks of ``comm``. Collective.

    Args:
        comm: Whose ranks.
        name: What errors and traces call the group.
        options: Timeouts and sizes.
        kind: One of `KINDS`; None picks by where the ranks are.
        machine: The ranks that share memory with this one; asked of MPI if None. Tests make several hosts of one
            machine with it.
        device: As in `open_group`.
    """
    size = comm.Get_size()
    with _watched(comm, name=name, timeout=options.timeout):
        if size > 1:
            abort_job_on_exception(comm, full_traceback=options.full_traceback)
        from mpi4py import MPI

        from zerort.comm.transports.hierarchical import HierarchicalTransport
        from zerort.comm.transports.mpi import MpiTransport

        _agree_on_options(comm, options)
        if machine is None:
            machine = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank()))
        hosts = comm.allgather(machine.bcast(comm.Get_rank(), root=0))  # a host is called by its lowest rank
        several = len(set(hosts)) > 1
        crowded = len(set(hosts)) < size
        # The form of the rendezvous in Python has no barriers for processors that reorder stores.
        shares = all(comm.allgather(native.AVAILABLE or platform.machine() in _STORES_IN_ORDER))
        best = (
            "solo"
            if size == 1
            else "mpi"
            if not shares
            else "node"
            if not several
            else "hierarchical"
            if crowded
            else "mpi"
        )
        wanted = _agreed_kind(comm, kind or best)
        if wanted == "solo" and size > 1:
            raise BootstrapError(f"Expected one rank for a solo group, got {size}.")
        if wanted == "node" and several:
            raise BootstrapError(
                f"Expected all {size} ranks on one machine for a node group, got {len(set(hosts))} machines. "
                "Leave kind out, or ask for 'hierarchical' or 'mpi'."
            )
        if wanted in ("node", "hierarchical"):
            if not shares:
                raise BootstrapError(
                    f"Expected the native kernels for a {wanted} group on {platform.machine()}, got none on some rank. "
                    "Install a C++ compiler and zerort again, or leave kind out: the group then goes over MPI."
                )
            _expect_room_for_all(options, size)
        if wanted == "solo":
            return SoloTransport(name=name, options=options)
        if wanted == "mpi":
            return MpiTransport(comm, hosts=hosts, name=name, options=options)
        if wanted == "node":
            return open_node(comm, name=name, options=options)
        if wanted == "hierarchical":
            node = open_node(machine, name=f"{name} on {os.uname().nodename}", options=options, everyone=comm)
            return HierarchicalTransport(comm, node, hosts=hosts, name=name, options=options, open_part=best_transport)
    # All ranks are here. What follows has timeouts of its own, which say what NCCL waits for.
    host = best_transport(comm, name=name, options=options, kind=best, machine=machine)
    return open_on_gpus(host, local_rank=machine.Get_rank(), hosts=hosts, device=device)


def open_node(
    machine: MPI.Intracomm,
    *,
    name: str,
    options: GroupOptions,
    everyone: MPI.Intracomm | None = None,
    allow_native: bool = True,
) -> NodeTransport:
    """Build the node transport of this machine's ranks; if that fails on any machine, it fails on ``everyone``."""
    everyone = machine if everyone is None else everyone
    able = machine.allgather(native.AVAILABLE and allow_native)
    sees_processes = see_each_other(machine.allgather)
    named = not (sees_processes and can_open_each_other(machine.allgather))
    crowded = share_cores(everyone.allgather)
    control, path, error = None, "", ""
    if machine.Get_rank() == 0:
        for directory in {"/dev/shm", options.shm_dir}:  # MPI libraries know only the first
            sweep(directory)
        try:
            control = open_control(machine.Get_size(), options.shm_dir, named=named)
            path = control.path
        except SharedMemoryError as problem:
            error = str(problem)
    path = machine.bcast(path, root=0)
    transport = None
    if path:
        try:
            transport = NodeTransport(
                path,
                machine.Get_rank(),
                machine.Get_size(),
                name=name,
                options=options,
                in_native=all(able),
                sees_processes=sees_processes,
                named=named,
                crowded=crowded,
                abroad=everyone is not machine,
            )
        except SharedMemoryError as problem:
            error = str(problem)
    machine.Barrier()
    if control is not None:
        control.close()
    _agree_on_success(everyone, error)
    assert transport is not None
    try:
        transport.start()
    except SharedMemoryError as problem:
        error = str(problem)
    _agree_on_success(everyone, error)
    return transport


def _agree_on_options(comm: MPI.Intracomm, options: GroupOptions) -> None:
    """Refuse options that differ between ranks where both sides of an exchange must use the same."""
    for field in ("staging_nbytes", "exchange_nbytes", "message_nbytes", "shm_dir"):
        values = comm.allgather(getattr(options, field))
        if len(set(values)) > 1:
            rows = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise BootstrapError(f"Expected the same GroupOptions.{field} on all ranks, got {rows}.")


def _expect_room_for_all(options: GroupOptions, size: int) -> None:
    """Refuse slabs without room for an element of every rank: arrays would pass through them in pieces of nothing."""
    got, needed = min(options.staging_nbytes, options.exchange_nbytes), size * _WIDEST_NBYTES
    if got < needed:
        raise BootstrapError(
            f"Expected at least {needed} bytes to stage arrays of {size} ranks, got {got}. Raise "
            "GroupOptions.staging_nbytes and exchange_nbytes (ZERORT_STAGING_BYTES, ZERORT_EXCHANGE_BYTES)."
        )


def _agree_on_success(comm: MPI.Intracomm, error: str) -> None:
    for rank, story in enumerate(comm.allgather(error)):
        if story:
            raise SharedMemoryError(f"{story} (rank {rank})")


def _agreed_kind(comm: MPI.Intracomm, kind: str) -> str:
    kinds = comm.allgather(kind)
    if len(set(kinds)) > 1:
        rows = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(kinds))
        raise BootstrapError(f"Expected one kind of group on all ranks, got {rows}.")
    return kind


@contextlib.contextmanager
def _watched(comm: MPI.Intracomm, *, name: str, timeout: float) -> Iterator[None]:
    """End the job if not every rank comes to open the group: MPI's own collectives would wait for ever."""

    def end() -> None:
        end_job(
            f"waited for others. Expected all {comm.Get_size()} ranks to open group {name!r} within {timeout:.0f} s, "
            "got fewer. Every rank must call open_group; ZERORT_TIMEOUT=seconds waits longer."
        )

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    if comm.Get_size() > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
