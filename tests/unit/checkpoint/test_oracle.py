"""What `Runtime.save` wrote is what the units show, read by a reader that shares no code with zerort."""

import numpy as np
import pytest
from ml_dtypes import bfloat16
from read_checkpoint import read_checkpoint

import zerort as zr
from zerort.testing.threads import run_threads

NVME, HOST = zr.Tier.NVME, zr.Tier.HOST
SHAPES = {"w": (90, 31), "b": (31,), "scale": (), "none": (0, 3)}
DTYPES = {"double": np.float64, "single": np.float32, "half": bfloat16}
LR, BETAS, EPS, DECAY, STEPS = 0.05, (0.9, 0.999), 1e-8, 0.1, 3
PLANS = {
    "zero0": zr.Plan.zero(0),
    "zero1": zr.Plan.zero(1),
    "zero2 state on nvme": zr.Plan.zero(2, state=NVME),
    "zero3": zr.Plan.zero(3),
    "zero3 on host": zr.Plan.zero(3, parameter=HOST, gradient=HOST, state=HOST),
    "zero3 on nvme": zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME),
}


def draw(seed):
    """Return random tensors of every unit, in float64."""
    generator = np.random.default_rng(seed)
    return {(u, name): generator.standard_normal(SHAPES[name]) for u in DTYPES for name in SHAPES}


def adamw(value, gradients):
    """Return a parameter and its moments after some steps of AdamW, by the book, in float64."""
    mean, square = np.zeros_like(value), np.zeros_like(value)
    for step, gradient in enumerate(gradients, 1):
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        root = np.sqrt(square / (1 - BETAS[1] ** step)) + EPS
        value = value - LR * (mean / (1 - BETAS[0] ** step) / root + DECAY * value)
    return value, mean, square


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_reader_of_its_own_finds_what_was_saved(plan, ranks, tmp_path):
    start, gradients = draw(0), [draw(step) for step in range(1, STEPS + 1)]

    def body(group):
        with zr.open(
            group=group,
            plan=plan,
            optimizer=zr.AdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
            scratch=tmp_path / "scratch",
            create_scratch=True,
            offload=zr.OffloadOptions(chunk_nbytes=8192, threads=2),
        ) as rt:
            for unit, dtype in DTYPES.items():
                rt.register(unit, {name: start[unit, name].astype(dtype) for name in SHAPES})
            for step in gradients:
                for unit in rt.units.values():
                    unit.reduce({name: step[unit.name, name].astype(DTYPES[unit.name]) for name in SHAPES})
                rt.step()
            rt.save(tmp_path / "ckpt", progress={"rank": rt.rank})
            shown = {}
            for unit in rt.units.values():
                with unit.gathered() as p:
                    shown.update({f"{unit.name}.{name}": np.array(value) for name, value in p.items()})
            return shown

    shown = run_threads(ranks, body)
    body, saved = read_checkpoint(tmp_path / "ckpt")
    assert (body["ranks"], body["meta"]["updates"]) == (ranks, STEPS)
    assert body["progress"] == [{"rank": rank} for rank in range(ranks)]
    names = {f"{unit}.{name}" for unit in DTYPES for name in SHAPES}
    assert saved.keys() == {(kind, name) for kind in ("parameter", "exp_avg", "exp_avg_sq") for name in names}
    for found in shown:
        assert found.keys() == names
        for name, value in found.items():  # a unit in half precision is saved as its master weights
            assert saved["parameter", name].astype(value.dtype).tobytes() == value.tobytes(), name
    for name in SHAPES:
        expected = adamw(start["double", name], [step["double", name] for step in gradients])
        for kind, value in zip(("parameter", "exp_avg", "exp_avg_sq"), expected, strict=True):
            np.testing.assert_allclose(saved[kind, f"double.{name}"], value, rtol=1e-10, atol=1e-12, err_msg=kind)
