"""Loops of other frameworks on GPUs: CuPy's arrays through `zerort_numpy`, and tensors that come and go over DLPack."""

import functools
import threading

import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy
import gpu_runs
import hardware
from foreign import Framework

import zerort as zr
import zerort_numpy as zn
from zerort.comm import open_group
from zerort.engine import Attachment
from zerort.errors import StaleViewError
from zerort.native.dtypes import numpy_dtype
from zerort.testing.tolerance import OVER_STEPS

pytestmark = [pytest.mark.mpi, gpu_runs.at_most(2)]

SHAPES = {"w": (40, 30), "b": (30,)}
UNITS, STEPS = 3, 3
OPTIONS = {"optimizer": zr.AdamW(lr=1e-2), "clip_norm": 1.0}


@pytest.fixture(scope="module")
def hosts(options):
    with open_group(options=options) as group:
        yield group


def values(unit, dtype):
    generator = np.random.default_rng(unit)
    return {n: gpu_runs.narrow(generator.standard_normal(s).astype(np.float32), dtype) for n, s in SHAPES.items()}


def noise(step, rank, unit, name):
    """Return what makes this rank's gradient another than the others'."""
    generator = np.random.default_rng((step, rank, unit, len(name)))
    return generator.standard_normal(SHAPES[name]).astype(np.float32)


def weights(rt):
    """Return all parameters in one array."""
    return np.concatenate([one.reshape(-1) for one in gpu_runs.weights(rt).values()])


def distance(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def train_plainly(rt, dtype):
    """Train in a loop as NumPy's users write it, on hosts and on GPUs alike."""
    units = [zn.register(rt, f"unit{at}", values(at, dtype)) for at in range(UNITS)]
    for step in range(STEPS):
        for at in reversed(range(UNITS)):
            with units[at].gathered() as p:
                gradients = {name: gpu_runs.gradient_of(rt, p[name], noise(step, rt.rank, at, name)) for name in p}
            if at != 1:
                units[at].reduce(gradients)
                continue
            for name, place in units[at].gradients().items():
                place[...] = gradients[name]
            units[at].reduce()
        rt.step()
    return weights(rt)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_numpy_loop_runs_on_cupys_arrays(stage, gpus, hosts):
    with zr.open(group=hosts, plan=zr.Plan.zero(stage), **OPTIONS) as rt:
        expected = train_plainly(rt, "float64")
    with zr.open(group=gpus, plan=zr.Plan.zero(stage), **OPTIONS) as rt:
        assert distance(train_plainly(rt, "float64"), expected) < OVER_STEPS


def test_views_of_a_gpu_end_with_their_block(gpus):
    with zr.open(group=gpus, plan=zr.Plan.zero(3)) as rt:
        unit = zn.register(rt, "unit", values(0, "float32"))
        with unit.gathered() as p:
            assert type(p["w"]) is cupy.ndarray
            assert p["w"].data.ptr == rt.units["unit"].sections[0].parameters.view("unit.w").data.ptr
        with pytest.raises(StaleViewError, match=r"'w' of unit 'unit'"):
            p["w"]


class Beside(Attachment):
    """What the torch binding is to a runtime: it says on which stream verbs run."""

    def __init__(self, around):
        self.around = around


def train_beside(rt, framework, dtype, *, entered):
    """Train as the torch binding does: copies in the framework's memory, gradients from another thread.

    Args:
        rt: The runtime.
        framework: Who computes.
        dtype: Of the parameters.
        entered: Returns what the runtime is entered within.
    """
    rt.attachments.append(Beside(entered))
    kind = numpy_dtype(dtype)
    crossing = np.dtype(np.int16) if dtype == "bfloat16" else kind  # as what memory goes from one to the other
    with entered():
        units = [rt.register(f"unit{at}", values(at, dtype)) for at in range(UNITS)]

    def gather(unit):
        with entered(), unit.gathered() as p:
            views = {name: framework.from_dlpack(p[name].view(crossing)) for name in p}
            return {name: framework.compute(cupy.copy, view) for name, view in views.items()}

    def differentiate(tensor, ours):
        return framework.compute(lambda array: gpu_runs.gradient_of(rt, array.view(kind), ours).view(crossing), tensor)

    def backward(step, held):
        for at in reversed(range(UNITS)):
            for name, tensor in held.pop(at).items():
                gradient = differentiate(tensor, noise(step, rt.rank, at, name))
                with entered():
                    units[at].add(name, rt.device.from_dlpack(gradient).view(kind), donate=True)
                del gradient  # its memory is the framework's again, for the next tensor
            with entered():
                units[at].reduce()

    for step in range(STEPS):
        held = {at: gather(unit) for at, unit in enumerate(units)}
        thread = threading.Thread(target=backward, args=(step, held))
        thread.start()
        thread.join()
        rt.step()
    with entered():
        return weights(rt)


@pytest.mark.parametrize(
    ("stage", "dtype", "bound"), [(1, "float64", OVER_STEPS), (3, "float64", OVER_STEPS), (3, "bfloat16", 1e-2)]
)
def test_a_framework_with_a_stream_of_its_own(stage, dtype, bound, gpus, hosts):
    with zr.open(group=hosts, plan=zr.Plan.zero(stage), **OPTIONS) as rt:
        expected = train_plainly(rt, dtype)
    with zr.open(group=gpus, plan=zr.Plan.zero(stage), **OPTIONS) as rt:
        framework = Framework(rt.device)
        found = train_beside(rt, framework, dtype, entered=lambda: rt.device.on_stream(framework.stream))
        assert distance(found, expected) < bound


@hardware.only_emulated("a real one tells of no race")
def test_on_another_stream_than_the_frameworks_it_is_a_race(gpus):
    """The framework's memory is free for its next tensor while the runtime, on CuPy's stream, still reads it."""
    with zr.open(group=gpus, plan=zr.Plan.zero(3)) as rt:
        framework = Framework(rt.device)
        unit = rt.register("unit", values(0, "float32"))
        for name, shape in SHAPES.items():
            gradient = framework.compute(functools.partial(cupy.zeros, shape, np.float32))
            unit.add(name, rt.device.from_dlpack(gradient), donate=True)
            del gradient
        unit.reduce()
        rt.discard_gradients()
    assert any(line.startswith("race") for line in hardware.findings())
    hardware.clear()
