"""The facade: what it refuses and how it says so, and which form serves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from zerort import native
from zerort.native.dtypes import DTYPE_CODES, REDUCTION_CODES, native_dtypes

# Without a compiler the first call warns; that warning has a test of its own below.
pytestmark = pytest.mark.filterwarnings("ignore:zerort's native kernels are missing:RuntimeWarning")

ROOT = Path(__file__).parents[3]


def f32(numel: int = 8) -> np.ndarray:
    return np.ones(numel, np.float32)


def read_only() -> np.ndarray:
    array = f32()
    array.flags.writeable = False
    return array


def misaligned() -> np.ndarray:
    return np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float32)


ADAMW = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
LION = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: native.add_into(f32(), np.ones(8)), r"Expected a source of out's dtype or of lower .*, got float64"),
        (
            lambda: native.add_into(np.ones(8, np.float16), f32()),
            r"got float32 to add to float16\. Accumulate in",
        ),
        (lambda: native.add_into(f32(), f32(9)), r"Expected source of 8 elements, got 9"),
        (lambda: native.add_into(f32().view(np.int32), f32()), r"Expected out of dtype float32, .*, got int32"),
        (lambda: native.add_into(read_only(), f32()), r"Expected out to be writable"),
        (
            lambda: native.copy_checked(f32(), f32().view(np.int32)),
            r"Expected the same dtype, or float32 .*, got int32",
        ),
        (lambda: native.copy_checked(f32(), f32(9)), r"Expected source of 8 elements, got 9"),
        (lambda: native.copy_checked(np.ones(8), np.ones(8, np.float16)), r"got float16 to float64\. Go by way of"),
        (lambda: native.first_nonfinite(np.ones(8, np.int64)), r"Expected array of dtype float32, .*, got int64"),
        (lambda: native.first_nonfinite(np.ones((2, 2))), r"Expected array to be 1-D"),
        (lambda: native.square_sum(f32()[::2]), r"Expected array to be contiguous"),
        (lambda: native.square_sum(misaligned()), r"Expected array to be aligned"),
        (lambda: native.square_sum(None), r"Expected array to be a NumPy array, got NoneType"),
        (lambda: native.square_sums_into(np.empty(2), f32(), 0), r"Expected block to be a number .*, got 0"),
        (lambda: native.square_sums_into(np.empty(2), f32(), True), r"Expected block to be a number .*, got True"),
        (lambda: native.square_sums_into(np.empty(2), f32(), 3), r"Expected out of 3 elements, one for each .*, got 2"),
        (lambda: native.square_sums_into(f32(2), f32(), 4), r"Expected out of dtype float64, got float32"),
        (lambda: native.reduce_into(f32(), [f32()], "mean"), r"Expected reduction sum, max, min, got 'mean'"),
        (lambda: native.reduce_into(f32(), []), r"Expected sources to be a sequence of one or more arrays, got none"),
        (lambda: native.reduce_into(f32(), f32()), r"Expected sources to be a sequence .*, got ndarray"),
        (lambda: native.reduce_into(f32(), None), r"Expected sources to be a sequence .*, got NoneType"),
        (lambda: native.reduce_into(None, [f32()]), r"Expected out to be a NumPy array, got NoneType"),
        (lambda: native.reduce_into([1.0], [f32()]), r"Expected out to be a NumPy array, got list"),
        (lambda: native.reduce_into(f32(), [f32(), f32(9)]), r"Expected sources\[1\] of 8 elements, got 9"),
        (
            lambda: native.reduce_into(f32(), [f32().astype(float)]),
            r"Expected sources\[0\] of dtype float32, got float64",
        ),
        (
            lambda: native.reduce_into(f32(), [f32(16)[::2]]),
            r"Expected sources\[0\] to be contiguous, got strides \(8,\)",
        ),
        (lambda: native.reduce_into(read_only(), [f32()]), r"Expected out to be writable, got a read-only array"),
        (lambda: native.reduce_into(f32().reshape(2, 4), [f32()]), r"Expected out to be 1-D, got shape \(2, 4\)"),
        (
            lambda: native.reduce_into(f32().astype(">f4"), [f32()]),
            r"Expected out of dtype .*, got byte-swapped float32",
        ),
        (lambda: native.reduce_into(np.ones(8, bool), [f32()]), r"Expected out of dtype .*, got bool"),
        (lambda: native.reduce_into(misaligned(), [f32()]), r"Expected out to be aligned to its 4-byte elements"),
        (lambda: native.cast_into(f32(), np.ones(8, np.int32)), r"got int32 to float32\. Go by way of float32"),
        (
            lambda: native.cast_into(np.ones(8, np.float16), np.ones(8, ml_dtypes.bfloat16)),
            r"got bfloat16 to float16",
        ),
        (lambda: native.cast_into(f32(4), f32()), r"Expected source of 4 elements, got 8"),
        (lambda: native.copy_into(f32(), np.ones(8)), r"Expected source of dtype float32, got float64"),
        (lambda: native.touch(read_only()), r"Expected array to be writable"),
        (lambda: native.touch(np.ones((4, 4))[:, 1]), r"Expected array to be contiguous"),
        (lambda: native.touch(b"abc"), r"Expected array to be a NumPy array, got bytes"),
        (lambda: native.adamw_(f32(), f32(), f32(), f32(7), **ADAMW), r"Expected exp_avg_sq of 8 elements, got 7"),
        (
            lambda: native.adamw_(f32(), f32(), None, f32(), **ADAMW),
            r"Expected exp_avg to be a NumPy array, got NoneType",
        ),
        (
            lambda: native.adamw_(f32().astype(np.float16), f32(), f32(), f32(), **ADAMW),
            r"Expected param of dtype float32, float64, uint16, got float16",
        ),
        (
            lambda: native.adamw_(np.ones(8), f32(), np.ones(8), np.ones(8), **ADAMW),
            r"Expected grad of dtype float64, got float32",
        ),
        (
            lambda: native.adamw_(np.ones(8), np.ones(8), f32(), np.ones(8), **ADAMW),
            r"Expected exp_avg of dtype float64, got float32",
        ),
        (
            lambda: native.sgd_(np.ones(8), np.ones(8), None, lr=0.1, copy_out=np.ones(8, np.float16)),
            r"Expected no copy_out with parameters of float64, got one",
        ),
        (
            lambda: native.adamw_(f32(), np.ones(8), f32(), f32(), **ADAMW),
            r"Expected grad of dtype float32, bfloat16, float16, got float64",
        ),
        (
            lambda: native.adamw_(f32(), f32(), f32(), f32(), copy_out=f32(), **ADAMW),
            r"Expected copy_out of dtype bfloat16, float16, got float32",
        ),
        (
            lambda: native.adamw_(f32(), f32(), f32(), f32(), **(ADAMW | {"step": 0})),
            r"Expected step of 1 or more, got 0",
        ),
        (
            lambda: native.adamw_(f32(), f32(), f32(), f32(), **(ADAMW | {"beta2": 1})),
            r"Expected beta1 and beta2 in \[0, 1\)",
        ),
        (lambda: native.lion_(f32(), f32(), read_only(), **LION), r"Expected exp_avg to be writable"),
        (lambda: native.lion_(f32(), f32(), f32(), **(LION | {"beta1": -1})), r"Expected beta1 and beta2 in \[0, 1\)"),
        (
            lambda: native.sgd_(f32(), f32(), None, lr=0.1, momentum=0.9),
            r"Expected a momentum_buffer with momentum 0\.9",
        ),
        (lambda: native.sgd_(f32(), f32(), f32(), lr=0.1, nesterov=True), r"Expected momentum > 0 and dampening 0"),
    ],
)
def test_wrong_arguments_are_named_with_a_cure(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("Expected ")
    assert ", got " in text
    assert len(text.split(". ")) > 1, f"no cure in {text!r}"


def test_memory_that_overlaps_is_refused() -> None:
    memory = np.ones(64, np.float32)
    a, b = memory[:32], memory[16:48]
    with pytest.raises(ValueError, match=r"Expected out to be sources\[1\] itself or apart from it"):
        native.reduce_into(a, [a, b])
    with pytest.raises(ValueError, match=r"Expected out and source apart"):
        native.cast_into(memory.view(np.float16)[:32], a)
    with pytest.raises(ValueError, match=r"Expected exp_avg and param apart"):
        native.lion_(a, f32(32), b, **LION)
    for kernel in (native.add_into, native.copy_checked):
        with pytest.raises(ValueError, match=r"Expected out and source apart"):
            kernel(a, b)
    halves = np.ones(40, np.float16)
    with pytest.raises(ValueError, match=r"Expected copy_out and grad apart"):
        native.lion_(f32(32), halves[:32], f32(32), copy_out=halves[8:], **LION)
    assert (memory == 1).all()


def test_equal_dtypes_of_another_name_are_taken() -> None:
    # On Linux both are 64-bit integers, with dtype objects of their own.
    out = np.zeros(5, np.longlong)
    native.reduce_into(out, [np.ones(5, np.int64), np.ones(5, np.longlong)])
    assert (out == 2).all()


def test_codes_are_those_of_the_shared_header() -> None:
    header = (ROOT / "zerort" / "native" / "src" / "dtypes.h").read_text()

    def enumerators(name: str) -> list[str]:
        body = header.split(f"enum class {name} : std::uint8_t {{")[1].split("}")[0]
        return [entry.split("=")[0].strip() for entry in body.split(",") if entry.strip()]

    assert enumerators("Dtype") == sorted(DTYPE_CODES, key=DTYPE_CODES.__getitem__)
    assert enumerators("Reduction") == sorted(REDUCTION_CODES, key=REDUCTION_CODES.__getitem__)
    assert sorted(DTYPE_CODES.values()) == list(range(len(DTYPE_CODES)))
    assert {dtype.name: code for dtype, code in native_dtypes().items()} == DTYPE_CODES


USE_EVERY_KERNEL = """
    import json, sys, types, warnings
    import numpy as np

    # zerort.native on its own: the rest of zerort is not what is tested here.
    package = types.ModuleType("zerort")
    package.__path__ = [{package!r}]
    sys.modules["zerort"] = package
    if {block}:
        sys.modules["zerort.native._kernels"] = None  # makes its import fail
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from zerort import native
        at_import = len(caught)
        a, b, c, d = (np.ones(9, np.float32) for _ in range(4))
        native.reduce_into(a, [a, b])
        native.reduce_into(a, [a, b])
        native.cast_into(np.empty(9, native.BFLOAT16), a)
        native.copy_into(b, a)
        native.add_into(a, b)
        assert native.copy_checked(b, a) == native.first_nonfinite(a) == -1
        native.square_sums_into(np.empty(3), a, 4)
        assert native.square_sum(np.full(9, 2.0)) == 36
        native.touch(a)
        native.adamw_(a, b, c, d, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1)
        native.sgd_(a, b, None, lr=0.1)
        native.lion_(a, b, c, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1)
        assert native.crc32c(b"123456789") == 0xE3069283
        native.crc32c_combine(1, 2, 3)
    print(json.dumps(dict(
        at_import=at_import,
        available=native.AVAILABLE,
        describe=native.describe(),
        warnings=[[w.category.__name__, str(w.message), w.filename] for w in caught],
    )))
"""


def use_every_kernel(*, block: bool, **environment: str) -> dict:
    import json

    program = textwrap.dedent(USE_EVERY_KERNEL).format(package=str(ROOT / "zerort"), block=block)
    base = {key: value for key, value in os.environ.items() if key != "ZERORT_NATIVE"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=base | environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_missing_extension_warns_once_at_first_use_with_the_cure() -> None:
    said = use_every_kernel(block=True)
    assert said["at_import"] == 0
    assert not said["available"]
    [(category, message, filename)] = said["warnings"]
    assert category == "RuntimeWarning"
    assert "native kernels are missing" in message
    assert "Install a C++ compiler" in message
    assert "ZERORT_NATIVE=0" in message
    assert filename == "<string>"  # the caller of the kernel, not the kernel
    assert "missing" in said["describe"]


def test_sources_that_python_found_before_what_is_installed_are_told(tmp_path: Path) -> None:
    """After ``pip install .``, in the checkout: no compiler is missing."""
    checkout, installed = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(ROOT / "zerort", checkout / "zerort", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (installed / "zerort" / "native").mkdir(parents=True)
    (installed / "zerort" / "native" / f"_kernels{EXTENSION_SUFFIXES[0]}").touch()
    (installed / "zerort-0.1.0.dist-info").mkdir()
    (installed / "zerort-0.1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: zerort\nVersion: 0.1.0\n"
    )
    program = (
        "from zerort import native; from zerort.cli.doctor.software import check_software; import numpy as np\n"
        "native.square_sum(np.ones(3))\n"
        "print([one.cure for one in check_software() if one.topic == 'kernels'])"
    )
    # Without `site` there is no hook of an editable install: modules come from where the path says.
    path = os.pathsep.join([str(installed), *(one for one in sys.path if one.endswith("-packages"))])

    def run(where: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", "-c", program],
            cwd=where,
            env={key: text for key, text in os.environ.items() if key != "ZERORT_NATIVE"} | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )

    done = run(checkout)
    told = f"installed, in {installed}/zerort, but Python found the sources in {checkout}/zerort first"
    for text in (done.stderr, done.stdout):
        assert told in text
        assert "Run from another directory" in text
        assert "compiler" not in text
    shutil.rmtree(installed)  # then it is the compiler
    assert "Install a C++ compiler" in run(checkout).stderr


@pytest.mark.parametrize("block", [False, True])
def test_numpy_forms_on_request_say_nothing(block: bool) -> None:
    said = use_every_kernel(block=block, ZERORT_NATIVE="0")
    assert not said["available"]
    assert said["warnings"] == []
    assert "ZERORT_NATIVE=0" in said["describe"]
