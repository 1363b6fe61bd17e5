"""A checkpoint that older code wrote, on 2 ranks, is what it was: parameters, moments, counts and progress."""

from pathlib import Path

import numpy as np
import pytest
from runs import weights

import zerort as zr
from zerort.checkpoint import verify
from zerort.codec import find_format
from zerort.testing.threads import run_threads

OLD = Path(__file__).parent / "fixtures" / "saved_by_914b077"  # fixtures/make.py wrote it
SHAPES = {"w": (13, 7), "b": (7,), "none": (0, 3)}
DTYPES = {"full": "float32", "half": "bfloat16"}


def by_update(rt):
    return {f"{rt.updates}.{name}": value for name, value in weights(rt).items()}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_older_checkpoint_is_loaded_to_the_bit(ranks, stage):
    def body(group):
        plan, optimizer = zr.Plan.zero(stage), zr.AdamW(lr=0.1, weight_decay=0.01)
        with zr.open(group=group, plan=plan, optimizer=optimizer) as rt:
            for unit, dtype in DTYPES.items():
                rt.register(unit, {name: zr.TensorSpec(shape, dtype) for name, shape in SHAPES.items()})
            restored = rt.load(OLD)
            assert restored.updates == rt.updates == 3
            assert restored.every_progress == ({"sample": 100}, {"sample": 101})
            found = by_update(rt)
            for unit in rt.units.values():  # the step after it shows the moments, the master weights and the counts
                with unit.gathered() as p:
                    ones = {name: np.ones(value.shape, value.dtype) for name, value in p.items()}
                unit.reduce(ones)
            rt.step()
            return found | by_update(rt)

    with np.load(f"{OLD}.npz") as expected:
        for found in run_threads(ranks, body):
            assert found.keys() == set(expected.files)
            for name, value in found.items():
                assert value.dtype.name == DTYPES[name.split(".")[1]]
                np.testing.assert_array_equal(value.astype(np.float32), expected[name], err_msg=name)


def test_an_older_checkpoint_is_whole():
    assert verify(OLD) == []


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_an_older_checkpoint_becomes_codes(format):
    def body(group):
        found = []
        for frozen_format in (None, format):
            with zr.open(group=group, plan=zr.Plan.zero(3), frozen_format=frozen_format) as rt:
                for unit, dtype in DTYPES.items():
                    specs = {name: zr.TensorSpec(shape, dtype) for name, shape in SHAPES.items()}
                    rt.register(unit, specs, frozen=True)
                rt.load(OLD, optimizer=False)
                found.append(weights(rt))
        return found

    for exact, coded in run_threads(3, body):
        assert exact.keys() == coded.keys()
        for name, value in exact.items():
            source = value.astype(np.float32).reshape(-1)
            error = np.abs(coded[name].astype(np.float32).reshape(-1) - source)
            assert (error <= find_format(format).bound(source) + 2.0**-8 * np.abs(source)).all(), name
            assert not source.size or error.any()
