"""Compile a CUDA source with the real NVRTC, which needs no GPU: ``python nvrtc.py source.cu include option…``.

Prints a line ``sm_XX kernel kernel …`` for each architecture from Volta on that this NVRTC knows, and its kernels.
A process of its own: where the tests run, an emulated NVRTC may have taken the name.
"""

import ctypes
import re
import sys
from importlib import metadata
from pathlib import Path


def find_library(package="nvidia-cuda-nvrtc-cu12"):
    """Return where pip put NVRTC; None if it did not."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if re.fullmatch(r"libnvrtc\.so\.\d+", file.name)), None)


def find_headers(package="nvidia-cuda-runtime-cu12"):
    """Return the folder of CUDA's headers that pip installed; None if it did not."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(Path(file.locate()).parent) for file in files if file.name == "cuda_fp16.h"), None)


OLDEST = 70
"""Volta: what CUDA 12 still makes code for, and CuPy still runs on, of the GPUs that train."""


class Nvrtc:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self.library.nvrtcGetErrorString(code).decode()}")

    def architectures(self):
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def compile(self, source, options):
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
        words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        code = self.library.nvrtcCompileProgram(program, len(options), words)
        if code:
            raise RuntimeError(self._text(program, "ProgramLog"))
        ptx = self._text(program, "PTX")
        self._call("nvrtcDestroyProgram", ctypes.byref(program))
        return ptx

    def _text(self, program, what):
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.value.decode()


def main():
    source, include, *options = sys.argv[1:]
    nvrtc = Nvrtc(find_library())
    for architecture in (one for one in nvrtc.architectures() if one >= OLDEST):
        ptx = nvrtc.compile(
            Path(source).read_text(),
            [*options, f"--include-path={include}", f"--gpu-architecture=compute_{architecture}"],
        )
        fused = " FUSED" if re.search(r"\bfma\.rn\.f(32|64)", ptx) else ""
        print(f"sm_{architecture}", *re.findall(r"\.visible \.entry (\w+)", ptx), fused)


if __name__ == "__main__":
    main()
