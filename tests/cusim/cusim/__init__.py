"""An emulated CUDA device: the real, unmodified CuPy wheel, run on the CPU. See README.md.

    import cusim

    cusim.start()             # before cupy is imported; builds the emulator when it has changed
    import cupy               # finds two devices
    ...
    assert cusim.findings() == []

Processes that a test starts are told by their environment: ``subprocess.run(..., env=cusim.environment())``.
"""

from cusim.errors import CusimError
from cusim.findings import clear, findings, findings_in, host_reads, host_writes, reseed
from cusim.start import environment, start, started

__all__ = [
    "CusimError",
    "clear",
    "environment",
    "findings",
    "findings_in",
    "host_reads",
    "host_writes",
    "reseed",
    "start",
    "started",
]
