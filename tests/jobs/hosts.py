"""Several hosts on one machine: network namespaces joined by a bridge, each with its own host name and loopback.

Needs root and Debian's iproute2. MPICH's launcher starts its daemons on each "host" through a script that stands in for
ssh and enters the namespace; different host names keep MPI from using shared memory across them.
"""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import uuid
from pathlib import Path

from zerort.comm.bootstrap.environment import find_launcher
from zerort.testing.jobs import JobResult, wait_for_job

STAND_IN_FOR_SSH = """#!/bin/bash
# ssh [options] host command…  ->  the command in the namespace of that host
while [[ "$1" == -* ]]; do case "$1" in -o|-p|-l|-i) shift 2;; *) shift;; esac; done
host="${1#*@}"; shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; exec sh -c '$(printf %s "$*" | sed "s/'/'\\\\''/g")'"
"""


def why_not() -> str | None:
    """Return why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "making network namespaces needs iproute2 (apt-get install iproute2)"
    if find_launcher().vendor != "MPICH":
        return "only MPICH's launcher can be led into a namespace"
    probe = f"zrt-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class Hosts:
    """Hosts that live as long as the ``with`` block."""

    def __init__(self, count: int, directory: Path) -> None:
        tag = uuid.uuid4().hex[:4]
        self.names = [f"zrt{tag}{chr(ord('a') + k)}" for k in range(count)]
        self._bridge = f"zrt{tag}"
        self._ssh = directory / "stand-in-for-ssh"

    def __enter__(self) -> "Hosts":
        self._ssh.write_text(STAND_IN_FOR_SSH)
        self._ssh.chmod(self._ssh.stat().st_mode | stat.S_IXUSR)
        try:
            # The bridge has a namespace of its own: the machine's own network is left alone.
            _ip("netns", "add", self._bridge)
            _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "br0", "up")
            table = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{k + 1} {name}\n" for k, name in enumerate(self.names))
            for k, name in enumerate(self.names):
                _ip("netns", "add", name)
                _ip("link", "add", f"v{name}", "type", "veth", "peer", "name", f"w{name}")
                _ip("link", "set", f"v{name}", "netns", name)
                _ip("link", "set", f"w{name}", "netns", self._bridge)
                _ip("-n", name, "addr", "add", f"10.77.0.{k + 1}/24", "dev", f"v{name}")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", f"v{name}", "up")
                _ip("-n", self._bridge, "link", "set", f"w{name}", "master", "br0")
                _ip("-n", self._bridge, "link", "set", f"w{name}", "up")
                Path("/etc/netns", name).mkdir(parents=True)
                Path("/etc/netns", name, "hosts").write_text(table)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in [*self.names, self._bridge]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            with contextlib.suppress(OSError):
                shutil.rmtree(Path("/etc/netns", name))

    def run(self, ranks_per_host: int, words: list, *, timeout: float, env: dict[str, str]) -> JobResult:
        """Run ``python words…`` with so many ranks on every host."""
        first = self.names[0]
        launcher = [
            find_launcher().path,
            *("-launcher", "ssh", "-launcher-exec", str(self._ssh)),
            *("-hosts", ",".join(self.names), "-ppn", str(ranks_per_host)),
            *("-n", str(ranks_per_host * len(self.names)), "-genv", "UCX_TLS", "tcp,self"),
        ]
        script = 'hostname "$0"; exec "$@"'
        enter = ["ip", "netns", "exec", first, "unshare", "--uts", "sh", "-c", script, first]
        return wait_for_job([*enter, *launcher, sys.executable, *map(str, words)], timeout=timeout, env=env)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
