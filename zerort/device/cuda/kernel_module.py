"""`KernelModule`: CUDA source, compiled by NVRTC with the options given here and no others.

CuPy's own `RawModule` appends ``-ftz=true``, which flushes subnormal numbers to zero: kernels would no longer give the
host's bits (decision 0075). So the source goes to NVRTC without it, for the GPU's architecture. What was compiled is
kept in memory for each GPU, and on the disk where CuPy keeps its own (``CUPY_CACHE_DIR``, unless
``CUPY_CACHE_IN_MEMORY`` is set): the next process reads it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from zerort.config.environment import read_variable
from zerort.device.cuda.library import compile_source, cupy

__all__ = ["KernelModule"]

_DIGEST = 32
"""Bytes before what a file holds, the templates' names and the code: its checksum, as a disk may have been full."""


class KernelModule:
    """Kernels from one source.

    Args:
        source: A file of CUDA C++.
        options: What NVRTC is told beside the architecture and where CUDA's headers are.
        templates: Kernels that are templates, as they are asked for: ``"adamw<float>"``.
    """

    def __init__(self, source: Path, options: tuple[str, ...], templates: tuple[str, ...] = ()) -> None:
        self._source = source
        self._options = options
        self._templates = templates
        self._function = functools.cache(self._find)
        self._module = functools.cache(self._load)

    def get_function(self, name: str) -> Any:
        """Return a kernel for the current GPU; called with its grid, its block and its arguments."""
        return self._function(name, cupy.cuda.Device().id)

    def _find(self, name: str, device: int) -> Any:
        module, names = self._module(device)
        return module.get_function(names.get(name, name))

    def _load(self, device: int) -> tuple[Any, dict[str, str]]:
        code, names = self._compiled()
        module = cupy.cuda.Module()
        module.load(code)
        return module, names

    def _compiled(self) -> tuple[bytes, dict[str, str]]:
        """Return the code for the current GPU and its templates' names: from the disk, or compiled and put there."""
        source = self._source.read_text()
        if read_variable("CUPY_CACHE_IN_MEMORY") not in ("", "0"):
            return self._compile(source)
        key = repr(
            [
                *(source, self._options, self._templates, cupy.cuda.Device().compute_capability, cupy.__version__),
                *(cupy.cuda.nvrtc.getVersion(), read_variable("CUPY_COMPILE_WITH_PTX")),
            ]
        )
        folder = Path(read_variable("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
        path = folder / f"zerort-{hashlib.sha256(key.encode()).hexdigest()[:40]}.cubin"
        with contextlib.suppress(OSError):
            kept = path.read_bytes()
            if hashlib.sha256(kept[_DIGEST:]).digest() == kept[:_DIGEST]:
                names, _, code = kept[_DIGEST:].partition(b"\n")
                return code, json.loads(names)
        code, found = self._compile(source)
        content = json.dumps(found).encode() + b"\n" + code
        with contextlib.suppress(OSError):  # it is compiled again next time
            _write(path, hashlib.sha256(content).digest() + content)
        return code, found

    def _compile(self, source: str) -> tuple[bytes, dict[str, str]]:
        return compile_source(source, self._options, name=self._source.name, templates=self._templates)


def _write(path: Path, content: bytes) -> None:
    """Write a file that other ranks read and write: as a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
