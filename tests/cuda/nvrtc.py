"""Compile a CUDA source with the real NVRTC, which needs no GPU: ``python nvrtc.py source.cu include option…``.

Prints a line ``sm_XX kernel kernel …`` for each architecture from Volta on that this NVRTC knows, and its kernels.
A process of its own: where the tests run, an emulated NVRTC may have taken the name.
"""

import contextlib
import ctypes
import re
import sys
from importlib import metadata
from pathlib import Path


def find_library():
    """Return where pip put NVRTC; None if it did not."""
    return _find(r"libnvrtc\.so\.\d+", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")


def find_headers():
    """Return the folder of CUDA's headers that pip installed; None if it did not."""
    header = _find(r"cuda_fp16\.h", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime")
    return None if header is None else str(Path(header).parent)


def _find(name, *packages):
    """Return where a file of one of the packages is, CUDA 12's or, from CUDA 13 on, those without a number."""
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(package) or []:
                if re.fullmatch(name, file.name):
                    return str(file.locate())
    return None


OLDEST = 70
"""Volta: the oldest of the GPUs that train for which CUDA 12 makes code. CUDA 13 begins at Turing, 75."""


class Nvrtc:
    def __init__(self, path):
        for part in Path(path).parent.glob("libnvrtc-builtins.so.*"):  # CUDA 13's NVRTC does not look beside itself
            ctypes.CDLL(str(part))
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

    def compile(self, source, options, templates):
        """Return the code, and what each template is called in it."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
        for name in templates:
            self._call("nvrtcAddNameExpression", program, name.encode())
        words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        code = self.library.nvrtcCompileProgram(program, len(options), words)
        if code:
            raise RuntimeError(self._text(program, "ProgramLog"))
        ptx = self._text(program, "PTX")
        lowered = {self._lowered(program, name): name for name in templates}
        self._call("nvrtcDestroyProgram", ctypes.byref(program))
        return ptx, lowered

    def _lowered(self, program, name):
        found = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(found))
        return found.value.decode()

    def _text(self, program, what):
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.value.decode()


def main():
    source, include, *words = sys.argv[1:]
    options = [word for word in words if word.startswith("-")]
    templates = [word for word in words if not word.startswith("-")]
    nvrtc = Nvrtc(find_library())
    for architecture in (one for one in nvrtc.architectures() if one >= OLDEST):
        ptx, lowered = nvrtc.compile(
            Path(source).read_text(),
            [*options, f"--include-path={include}", f"--gpu-architecture=compute_{architecture}"],
            templates,
        )
        fused = " FUSED" if re.search(r"\bfma\.rn\.f(32|64)", ptx) else ""
        flushing = " FLUSHING" if ".ftz" in ptx else ""
        entries = re.findall(r"\.(?:visible|weak) \.entry (\w+)", ptx)
        print(f"sm_{architecture}", *(lowered.get(entry, entry) for entry in entries), fused, flushing)


if __name__ == "__main__":
    main()
