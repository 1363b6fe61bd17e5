"""Small trainings, element by element, that hosts and GPUs can both do: gradients depend on parameters and step."""

from __future__ import annotations

import cupy
import numpy as np
import pytest
import runs
from mpi4py import MPI

import zerort as zr
from zerort.comm.transports.nccl.moves import NcclMoves
from zerort.native import cast_into
from zerort.native.dtypes import numpy_dtype

SHAPES = {"w": (90, 70), "b": (70,), "c": (61, 41), "empty": (0, 3)}
UNITS = 3


def at_most(ranks):
    """Leave tests out with more ranks: what they show each rank does by itself, and more of them take their time."""
    return pytest.mark.skipif(MPI.COMM_WORLD.size > ranks, reason=f"at most {ranks} ranks")


def first_values(dtype):
    """Return the first values of all units."""
    generator = np.random.default_rng(0)
    return [
        {name: narrow(generator.standard_normal(shape).astype(np.float32), dtype) for name, shape in SHAPES.items()}
        for _ in range(UNITS)
    ]


def narrow(array, dtype):
    """Round an array on the host."""
    out = np.empty(array.shape, numpy_dtype(dtype))
    cast_into(out.reshape(-1), array.reshape(-1))
    return out


def gradient_of(rt, value, noise):
    """Return a parameter's gradient, where the parameter lies and in its dtype: half of it, moved by noise."""
    kind = np.float64 if value.dtype == np.float64 else np.float32
    if isinstance(value, np.ndarray):
        return narrow(value.astype(kind) * kind(0.5) + noise, value.dtype)
    from zerort.optim import kernels_cuda as kernels

    wide = cupy.empty(value.size, kind)
    kernels.cast_into(wide, value.reshape(-1))
    wide = wide * kind(0.5) + cupy.asarray(noise.reshape(-1))
    out = rt.device.scratch(value.size, value.dtype)
    kernels.cast_into(out, wide)
    return out.reshape(value.shape)


def register(rt, dtype):
    """Register the units; of the last one a tensor is frozen."""
    for at, tensors in enumerate(first_values(dtype)):
        rt.register(f"unit{at}", tensors, frozen="c" if at == UNITS - 1 else False)


def train(rt, dtype, *, steps=4, seed=1):
    """Train, and return the reports."""
    if not rt.units:
        register(rt, dtype)
    units = list(rt.units.values())
    reports = []
    for step in range(steps):
        for shard in rt.micro_batches:
            generator = np.random.default_rng((seed, step, shard))
            gradients = {}
            for unit in (*units, *units[::-1]):
                with unit.gathered() as p:
                    for name in unit.trainable:
                        noise = generator.standard_normal(p[name].shape).astype(np.float32)
                        gradients[unit.name, name] = gradient_of(rt, p[name], noise)
            for unit in units[::-1]:
                names = [name for name in unit.trainable if (step, name) != (1, "b")]  # once without a gradient
                unit.reduce({name: gradients.pop((unit.name, name)) for name in names})
        reports.append(rt.step())
    return reports


def weights(rt):
    """Return all parameters, on the host, in float64."""
    return {name: value.astype(np.float64) for name, value in runs.weights(rt).items()}


def expected(group, dtype, *, steps=4, **options):
    """Return what the same training gives on the host: weights and reports."""
    with zr.open(group=group, **options) as rt:
        reports = train(rt, dtype, steps=steps)
        return weights(rt), reports


class NcclCalls:
    """NCCL's calls over data, by collective of a group: a look over the shoulder of the real communicator."""

    def __init__(self, monkeypatch):
        self.made = []
        """(collective, its name, NCCL's calls), in the order in which they were queued on the GPU."""
        for verb in ("all_reduce", "move"):
            monkeypatch.setattr(NcclMoves, verb, self._watched(getattr(NcclMoves, verb)))

    def _watched(self, serve):
        def watched(moves, call):
            names, communicator = [], moves._communicator
            moves._communicator = _Listed(communicator, names)
            try:
                serve(moves, call)
            finally:
                moves._communicator = communicator
            self.made.append((call.op, call.name, names))

        return watched


class _Listed:
    def __init__(self, communicator, names):
        self._communicator, self._names = communicator, names

    def __getattr__(self, name):
        self._names.append(name)
        return getattr(self._communicator, name)
