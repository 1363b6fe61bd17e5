"""The one place where cupy is imported, so that asking for CUDA without it says what to install.

Every other file of the GPU path takes ``cupy`` from here. Nothing imports this file unless someone asks for a GPU. May
import: errors.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from zerort.errors import DeviceError

__all__ = [
    "allow_captures",
    "compile_source",
    "count_gpus",
    "cupy",
    "foreign_stream",
    "has_passed",
    "is_captured",
    "is_out_of_memory",
    "load_nccl",
    "modern",
    "new_stream",
    "stream_handle",
    "version_text",
]

try:
    import cupy as _cupy
except ImportError as error:
    raise DeviceError(
        f"Expected CuPy, which drives the GPUs, got: {error}. "
        "Run pip install 'cupy-cuda12x[ctk]' nvidia-nccl-cu12 (cupy-cuda13x and -cu13 where nvidia-smi says CUDA 13); "
        'without a GPU, leave kind="nccl" out.'
    ) from error

cupy: Any = _cupy
"""The module. Typed as Any: CuPy ships no types."""

modern: bool = int(cupy.__version__.split(".")[0]) >= 14
"""Whether this is CuPy 14 or later; 13 knows no priorities of streams, and NCCL's ids as numbers."""

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NOT_READY = 600  # cudaErrorNotReady
_CAPTURE_ERRORS = range(900, 908)  # from cudaErrorStreamCaptureUnsupported to cudaErrorCapturedEvent
_THREAD_LOCAL, _RELAXED = 1, 2  # modes in which a thread meets captures


def count_gpus() -> int:
    """Return how many GPUs this process sees.

    Raises:
        DeviceError: There is none, or no driver.
    """
    cure = (
        "Look at nvidia-smi and CUDA_VISIBLE_DEVICES; in a container, start it with --gpus all. To train without one, "
        'leave kind="nccl" out.'
    )
    try:
        count: int = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"Expected a GPU, got no GPU here: {error}. {cure}") from error
    if not count:
        raise DeviceError(f"Expected a GPU, got no GPU here. {cure}")
    return count


def new_stream(priority: int) -> Any:
    """Return a CUDA stream that the legacy default stream, on which plain CuPy code runs, does not hold up."""
    return cupy.cuda.Stream(non_blocking=True, **({"priority": priority} if modern else {}))


def stream_handle(stream: Any) -> int:
    """Return the handle of another framework's stream: by ``__cuda_stream__``, or as torch before 2.10 has it."""
    handle: int = stream.__cuda_stream__()[1] if hasattr(stream, "__cuda_stream__") else stream.cuda_stream
    return handle


class _ForeignStream:
    """A handle with the protocol that CuPy 14 asks for."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def foreign_stream(handle: int) -> Any:
    """Return another framework's stream as one of CuPy's that does not own it."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_ForeignStream(handle))
    return cupy.cuda.ExternalStream(handle)  # CuPy 13, which does not know the protocol


def compile_source(
    source: str, options: tuple[str, ...], *, name: str, templates: tuple[str, ...]
) -> tuple[bytes, dict[str, str]]:
    """Compile CUDA C++ for the current GPU with NVRTC, told ``options`` and what any code needs: CUDA's headers.

    CuPy's modules would add ``-ftz=true``.

    Returns:
        The code, and what each of the templates is called in it.
    """
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda import compiler

    told = assemble_cupy_compiler_options(options)
    if not modern:  # CuPy 13 looks for headers from wheels in another place
        told += compiler._get_extra_include_dir_opts()
    code, names = compiler.compile_using_nvrtc(source, told, filename=name, name_expressions=templates)
    return code if isinstance(code, bytes) else code.encode(), names or {}


@functools.cache
def _driver() -> Any:
    return ctypes.PyDLL("libcuda.so.1")  # which CuPy has loaded; its calls here are too short to let others run


def _meet_captures(mode: int) -> int:
    """Set the mode in which this thread meets captures of streams into graphs, and return the one before."""
    exchanged = ctypes.c_int(mode)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
    return exchanged.value


def allow_captures() -> None:
    """Let other threads capture streams into graphs: called by each thread of ours before it uses CUDA.

    Unless told so, CUDA refuses a thread to allocate or to ask for an event while another one captures, as
    ``torch.cuda.graph`` does, and the capture fails, too.
    """
    _meet_captures(_THREAD_LOCAL)


def _query(event: Any) -> int:
    """Return CUDA's answer about an event. Whoever asks breaks no capture, of this thread or of another."""
    before = _meet_captures(_RELAXED)  # gpu-wait: whoever_asks_for_work [_RELAXED -> 0]
    try:
        status: int = cupy.cuda.runtime.eventQuery(event.ptr)
    finally:
        _meet_captures(before)
    return status


def is_captured(event: Any) -> bool:
    """Say whether an event was recorded in a capture: the GPU never comes to it."""
    return _query(event) in _CAPTURE_ERRORS


def has_passed(event: Any) -> bool:
    """Say whether the GPU has come to an event. CuPy's ``Event.done`` would say no for ever after a fault.

    Raises:
        DeviceError: The GPU had a fault: it comes to nothing any more.
    """
    status = _query(event)
    if status not in (0, _NOT_READY, *_CAPTURE_ERRORS):
        error = cupy.cuda.runtime.CUDARuntimeError(status)
        raise DeviceError(
            f"Expected the GPU to do what was queued on it, got: {error}. A kernel before this failed, and the "
            "GPU does nothing more for this process: end it. compute-sanitizer, or CUDA_LAUNCH_BLOCKING=1, shows which."
        )
    return status == 0


def load_nccl() -> Any:
    """Return ``cupy.cuda.nccl``, with its library loaded.

    Raises:
        DeviceError: CuPy finds no libnccl.
    """
    try:
        from cupy.cuda import nccl

        if not getattr(nccl, "available", True):  # CuPy 14 then has a module without functions
            raise ImportError("CuPy finds no libnccl.so.2")
        nccl.get_version()
    except Exception as error:  # an import, a library or a symbol, depending on CuPy's version
        raise DeviceError(
            f"Expected NCCL, over which GPUs talk, got: {error}. "
            "Run pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 for CUDA 13)."
        ) from error
    return nccl


def version_text(number: int) -> str:
    """Return NCCL's version as people write it: 23007 is 2.30.7."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether CUDA, or CuPy's pool, had no memory left."""
    return isinstance(error, cupy.cuda.memory.OutOfMemoryError) or getattr(error, "status", None) == _OUT_OF_MEMORY
