"""`Hosts`: several hosts on one machine: network namespaces on a bridge, each with its own host name and loopback.

        zrt3f2ab ─ vzrt3f2ab ══ wzrt3f2ab ┐
        zrt3f2ac ─ vzrt3f2ac ══ wzrt3f2ac ┼ br0, in a namespace of its own: the machine's own network is left alone
        …              └ rate, delay ┘    ┘

Needs root and iproute2. MPICH's launcher starts its daemons on each host through a script that stands in for ssh and
enters the namespace; different host names keep MPI from using shared memory across them.

[Note: owners]
A namespace outlives its maker. Before one is made, /run/zerort-hosts/NAME says which process makes it; the next `Hosts`
on the machine removes those of owners that have died, and ends what still runs in them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from zerort.comm.bootstrap.environment import find_launcher
from zerort.errors import BootstrapError

__all__ = ["Hosts", "expect_hosts", "sweep_namespaces"]

_PREFIX = "zrt"
_CONFIG = Path("/etc/netns")
"""What it holds under a namespace's name stands in /etc there."""
_OWNERS = Path("/run/zerort-hosts")
_BURST = "128kb"
"""Of the rate's bucket: two of the 64 KiB segments that the kernel hands down. What fits is as fast as without."""
_QUEUE = "100ms"
"""How long a segment may wait for its turn before it is dropped."""

_STAND_IN_FOR_SSH = """#!/bin/bash
# ssh [options] host command…  ->  the command in the namespace of that host
while [[ "$1" == -* ]]; do case "$1" in -o|-p|-l|-i) shift 2;; *) shift;; esac; done
host="${1#*@}"; shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; exec sh -c '$(printf %s "$*" | sed "s/'/'\\\\''/g")'"
"""


def expect_hosts(*, delay: str | None = None, rate: str | None = None) -> None:
    """Raise unless hosts can be made here.

    Raises:
        BootstrapError: They cannot; it says what is missing.
    """
    if os.geteuid() != 0:
        raise BootstrapError("Expected root, to make network namespaces, got another user. Use sudo.")
    for tool in ("ip", "tc") if delay or rate else ("ip",):
        if shutil.which(tool) is None:
            raise BootstrapError(
                f"Expected the command {tool}, to make network namespaces, got none on the PATH. Install iproute2: "
                "apt-get install iproute2."
            )
    vendor = find_launcher().vendor
    if vendor != "MPICH":
        raise BootstrapError(
            f"Expected MPICH's mpirun, which can be led into network namespaces, got {vendor}'s. In an environment of "
            "its own: pip install mpich."
        )
    with Hosts(1, rate=rate, delay=delay):
        pass


class Hosts:
    """Hosts that live as long as the ``with`` block.

    Args:
        count: How many.
        rate: Of every host's link, each way, as ``tc`` reads it: ``"1gbit"``; as fast as the kernel copies if None.
        delay: One way between two hosts, as ``tc`` reads it: ``"5ms"``; None for that of the kernel.
    """

    def __init__(self, count: int, *, rate: str | None = None, delay: str | None = None) -> None:
        tag = uuid.uuid4().hex[:4]
        self.names = [f"{_PREFIX}{tag}{_letters(k)}" for k in range(count)]
        self._bridge = f"{_PREFIX}{tag}"
        self._rate = rate
        self._delay = delay

    def __enter__(self) -> Hosts:
        sweep_namespaces()
        try:
            _add_namespace(self._bridge)
            made = os.open(_script_of(self._bridge), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o700)
            with open(made, "w", encoding="utf-8") as file:
                file.write(_STAND_IN_FOR_SSH)
            _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "br0", "up")
            for number, name in enumerate(self.names):
                self._add(name, _address(number))
            table = "".join(f"{_address(number)} {name}\n" for number, name in enumerate(self.names))
            for name in self.names:
                (_CONFIG / name / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, ranks: int | Sequence[int], words: Sequence[str | Path]) -> list[str]:
        """Return the words that run ``python words…`` on the hosts.

        Args:
            ranks: On every host; or on each of them.
            words: What Python gets as arguments.
        """
        each = [ranks] * len(self.names) if isinstance(ranks, int) else list(ranks)
        places = ",".join(f"{name}:{many}" for name, many in zip(self.names, each, strict=True))
        launcher = [
            find_launcher().path,
            *("-launcher", "ssh", "-launcher-exec", _script_of(self._bridge)),
            *("-hosts", places, "-n", str(sum(each)), "-genv", "UCX_TLS", "tcp,self"),
        ]
        enter = ["ip", "netns", "exec", self.names[0], "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
        return [*enter, self.names[0], *launcher, sys.executable, *map(str, words)]

    def _add(self, name: str, address: str) -> None:
        inner, outer = f"v{name}", f"w{name}"
        _add_namespace(name)
        _ip("link", "add", inner, "netns", name, "type", "veth", "peer", "name", outer, "netns", self._bridge)
        _ip("-n", name, "addr", "add", f"{address}/16", "dev", inner)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", inner, "up")
        _ip("-n", self._bridge, "link", "set", outer, "master", "br0")
        _ip("-n", self._bridge, "link", "set", outer, "up")
        shaped = [] if self._rate is None else ["tbf", "rate", self._rate, "burst", _BURST, "latency", _QUEUE]
        if self._delay is not None:
            rated = [] if self._rate is None else ["rate", self._rate]
            _tc(name, inner, ["netem", "delay", self._delay, *rated, "limit", "100000"], option="--delay")
        elif shaped:
            _tc(name, inner, shaped, option="--rate")
        if shaped:
            _tc(self._bridge, outer, shaped, option="--rate")

    def _remove(self) -> None:
        for name in [*self.names, self._bridge]:
            _remove_namespace(name)


def sweep_namespaces() -> list[str]:
    """Remove namespaces whose owner has died ([Note: owners]); return their names."""
    gone = []
    for path in sorted(_OWNERS.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError, ValueError):
            pid, since = path.read_text().split()
            if _start_of(int(pid)) != since:
                _remove_namespace(path.name)
                gone.append(path.name)
    return gone


def _add_namespace(name: str) -> None:
    _OWNERS.mkdir(exist_ok=True)
    draft = _OWNERS / f".{name}"  # whole when another process looks for the owners that have died
    draft.write_text(f"{os.getpid()} {_start_of(os.getpid())}")
    draft.rename(_OWNERS / name)
    (_CONFIG / name).mkdir(parents=True)
    _ip("netns", "add", name)


def _remove_namespace(name: str) -> None:
    """End what runs in a namespace, and remove it. Never raises."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
    for pid in pids.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    deleted = subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False).returncode == 0
    if deleted or not Path("/run/netns", name).exists():
        shutil.rmtree(_CONFIG / name, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_script_of(name))
        (_OWNERS / name).unlink(missing_ok=True)


def _script_of(bridge: str) -> str:
    """Return the path of the script by which the launcher reaches the hosts of a bridge."""
    return os.path.join(tempfile.gettempdir(), f"zerort-ssh-{bridge}")


def _start_of(pid: int) -> str | None:
    """Return when a process began, in ticks since boot; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _letters(number: int) -> str:
    return chr(ord("a") + number // 26) + chr(ord("a") + number % 26)


def _address(number: int) -> str:
    return f"10.77.{number // 250}.{number % 250 + 1}"


def _ip(*words: str) -> None:
    _run(["ip", *words], "Expected to make a network namespace")


def _tc(namespace: str, device: str, words: list[str], *, option: str) -> None:
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *words]
    _run(command, f"{option}: Expected tc to shape a link by {words[0]}")


def _run(command: list[str], expected: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        cure = (
            "This kernel was built without it (modprobe sch_netem sch_tbf)."
            if "qdisc kind" in reason
            else "A container needs the right to do so (docker run --privileged)."
        )
        raise BootstrapError(f"{expected}, got {reason!r} from {shlex.join(command)}. {cure}")
