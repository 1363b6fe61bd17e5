"""Open NCCL among ranks that reach each other on the host: together, or not at all.

    1. every rank takes a GPU      no two ranks of a host the same, unless asked for
    2. rank 0 makes the id         value or error, told to all
    3. all join                    each within the timeout; a rank that could not is an error on all

Each step ends in an agreement of all ranks on the host. Imports cupy only when called.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zerort.comm.guard.verdict import shortened
from zerort.comm.transport import Transport
from zerort.config.environment import read_variable
from zerort.errors import BootstrapError, DeviceError

if TYPE_CHECKING:
    from zerort.device.cuda.device import CudaDevice

__all__ = ["open_nccl", "open_on_gpus"]

_SEVERAL = "NCCL_MULTI_RANK_GPU_ENABLE"
"""What NCCL wants set to 1 for several ranks on one GPU, from version 2.30 on."""

_SEVERAL_SINCE = 23000


def open_on_gpus(host: Transport, *, local_rank: int, hosts: list[int], device: CudaDevice | None) -> Transport:
    """Return the NCCL transport of the ranks of ``host``, each on a GPU of its own. Collective.

    Args:
        host: Closed with what this returns, or if this raises.
        local_rank: This rank among those of its machine.
        hosts: For each rank, a number that tells its machine.
        device: The GPU to use; picked by ``local_rank`` if None.

    Raises:
        DeviceError: A rank has no GPU, or no CuPy; the same on every rank.
        BootstrapError: NCCL could not be opened; the same on every rank.
    """
    chosen: list[CudaDevice] = []

    def choose() -> list[Any]:
        from zerort.device.cuda.device import CudaDevice
        from zerort.device.cuda.library import count_gpus, cupy, load_nccl

        gpus = count_gpus()  # first: without a GPU CuPy finds no NCCL, either
        version = load_nccl().get_version()
        # Where the launcher shows each rank its own GPU only, that one is number 0 for all of them.
        chosen.append(CudaDevice(local_rank % gpus) if device is None else device)
        bus = cupy.cuda.runtime.deviceGetPCIBusId(chosen[0].ordinal)
        return [bus, gpus, version if read_variable(_SEVERAL) == "1" else 0]

    try:
        _expect_one_each(_together(host, choose), hosts)
        return open_nccl(host, chosen[0], owns_device=device is None)
    except BaseException:
        host.close()
        raise


def open_nccl(host: Transport, device: CudaDevice, *, owns_device: bool) -> Transport:
    """Return the NCCL transport of the ranks of ``host``. Collective."""
    from zerort.comm.transports.nccl.transport import NcclTransport
    from zerort.device.cuda.library import allow_captures, load_nccl, modern

    nccl = load_nccl()

    def make_id() -> list[int] | None:
        # Bytes since CuPy 14, signed numbers before.
        return None if host.rank else [number % 256 for number in nccl.get_unique_id()]

    numbers = _together(host, make_id)[0]
    id_bytes = bytes(numbers)
    unique_id: Any = id_bytes if modern else tuple(memoryview(id_bytes).cast("b"))
    patience = host.options.timeout / 2  # a rank whose joining fails at once waits for the others on the host meanwhile
    joined: list[Any] = []
    failures: list[Exception] = []

    def join() -> None:
        allow_captures()
        try:
            with device.cupy_device:
                joined.append(nccl.NcclCommunicator(host.size, unique_id, host.rank))
        except Exception as error:
            failures.append(error)

    def join_in_time() -> None:
        # On a thread of its own: NCCL waits for ever for a rank that does not come.
        thread = threading.Thread(target=join, name="zerort-nccl-init", daemon=True)
        thread.start()
        thread.join(patience)
        if failures:
            raise failures[0]
        if not joined:
            raise BootstrapError(
                f"Expected NCCL to join {host.size} ranks within {patience:.1f} s, got no answer on rank {host.rank}. "
                "Run with NCCL_DEBUG=INFO; NCCL_SOCKET_IFNAME picks the network interface."
            )

    try:
        _together(host, join_in_time)
    except BaseException:
        for communicator in joined:
            communicator.abort()
        raise
    return NcclTransport(host, device, joined[0], owns_device=owns_device, open_part=open_nccl)


def _together(host: Transport, step: Callable[[], Any]) -> list[Any]:
    """Do a step on every rank and return every rank's value; raise one rank's error on all of them."""
    try:
        story = {"value": step()}
    except Exception as error:  # whatever it is, the others must not wait for this rank
        kind = "DeviceError" if isinstance(error, DeviceError) else "BootstrapError"
        story = {"kind": kind, "text": shortened(error)}
    stories = [json.loads(text) for text in host.exchange_texts(json.dumps(story, ensure_ascii=False))]
    for rank, one in enumerate(stories):
        if "kind" in one:
            known = {"DeviceError": DeviceError, "BootstrapError": BootstrapError}[one["kind"]]
            raise known(f"{one['text']} (rank {rank})")
    return [one["value"] for one in stories]


def _expect_one_each(taken: list[Any], hosts: list[int]) -> None:
    """Refuse two ranks of a machine on one GPU, unless every rank asked for it and its NCCL can.

    Args:
        taken: For each rank its GPU, how many it sees, and its NCCL's version, 0 if it did not ask.
        hosts: For each rank a number that tells its machine.
    """
    from zerort.device.cuda.library import version_text

    version = min(version for *_, version in taken)
    if version >= _SEVERAL_SINCE:
        return
    why = f"to share a GPU, set {_SEVERAL}=1 on every rank (NCCL 2.30 or later)"
    if version:
        why = f"{_SEVERAL}=1 wants NCCL 2.30 or later, and there is {version_text(version)}"
    owners: dict[tuple[int, str], int] = {}
    for rank, (bus, gpus, _) in enumerate(taken):
        first = owners.setdefault((hosts[rank], bus), rank)
        if first != rank:
            ranks = hosts.count(hosts[rank])
            raise DeviceError(
                f"Expected a GPU for each of {ranks} ranks on a host, got ranks {first} and {rank} both on GPU {bus}; "
                f"{gpus} can be seen. Start at most as many ranks per host as it has GPUs (mpirun -n {gpus}), and look "
                f"at CUDA_VISIBLE_DEVICES; {why}."
            )
