"""State in fewer bytes: the same bits as whole masters under every plan and tier, and checkpoints of any form."""

import zlib

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import zerort as zr
from zerort.comm import open_group
from zerort.errors import CallError

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi

NVME = zr.Tier.NVME
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=1)  # chunks of 2048 elements
SHAPES = {"w": (90, 70), "b": (41,), "v": (5000,)}
PLANS = {
    **{f"zero{stage}": zr.Plan.zero(stage) for stage in (0, 1, 3)},
    "state-nvme": zr.Plan.zero(3, state=NVME),
    "all-nvme": zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME),
}


@pytest.fixture
def scratch(tmp_path):
    return WORLD.bcast(str(tmp_path))


def lot(*numbers):
    return np.random.default_rng(numbers)


def open_run(plan, scratch, group=None, virtual_shards=None, **settings):
    optimizer = zr.AdamW(lr=1e-2, weight_decay=0.1, **settings)
    options = {"offload": SMALL, "clip_norm": 1.0, "group": group, "virtual_shards": virtual_shards}
    rt = zr.open(plan, optimizer, scratch=scratch, create_scratch=True, **options)
    for at, (name, shape) in enumerate(SHAPES.items()):
        rt.register(name, {name: lot(at).standard_normal(shape).astype(BFLOAT16)})
    return rt


def train(rt, steps):
    """Return the parameters' digest after each step: every shard's gradients differ, one unit has none in odd steps."""
    digests = []
    for step in steps:
        for shard in rt.micro_batches:
            for at, (name, shape) in enumerate(SHAPES.items()):
                if name != "b" or step % 2 == 0:
                    rt.units[name].reduce({name: lot(step, at, shard).standard_normal(shape).astype(BFLOAT16)})
        assert rt.step().updated
        digests.append(digest_of(rt))
    return digests


def digest_of(rt):
    """Return a checksum of all parameters, without padding: that depends on the form of the state."""
    total = 0
    for name, unit in rt.units.items():
        with unit.gathered() as p:
            total = zlib.crc32(np.ascontiguousarray(p[name]).tobytes(), total)
    return total


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_remainders_have_the_bits_of_whole_masters(plan, scratch):
    if WORLD.size > 4:
        pytest.skip("1 to 4 ranks")
    with open_run(plan, f"{scratch}/a") as rt:
        expected = train(rt, range(4))
        whole = rt.memory()
        rt.save(f"{scratch}/whole")
        expected += train(rt, range(4, 6))
    with open_run(plan, f"{scratch}/b", master="remainder") as rt:
        assert train(rt, range(4)) == expected[:4]
        halved = rt.memory()
        rt.save(f"{scratch}/halved")
    numel = (whole.state + state_on_disk(whole, plan)) / 12
    assert halved.state + state_on_disk(halved, plan) == 10 * numel
    for form, path in (("float32", "halved"), ("remainder", "whole")):
        with open_run(plan, f"{scratch}/c", master=form) as rt:
            rt.load(f"{scratch}/{path}")
            assert digest_of(rt) == expected[3]
            assert train(rt, range(4, 6)) == expected[4:]


def state_on_disk(memory, plan):
    """Return the bytes of state that rest on a disk: beside 2 of parameters and 2 of gradients per element."""
    if plan.state.tier is not NVME:
        return 0
    others = 2 * (plan.parameter.tier is NVME) + 2 * (plan.gradient.tier is NVME)
    numel = padded_numel()
    return memory.nvme - others * numel


def padded_numel():
    with zr.open(zr.Plan.zero(3), zr.SGD(lr=0.1)) as rt:
        for name, shape in SHAPES.items():
            rt.register(name, {name: np.zeros(shape, BFLOAT16)})
        return rt.memory().parameter // 2


INT8 = {"moments": "int8", "master": "remainder"}
SHARDS = 4
CODED_PLANS = {
    **{name: PLANS[name] for name in ("zero0", "zero1", "zero3")},
    "nvme": zr.Plan.zero(3, parameter=NVME, state=NVME),
}


@pytest.mark.parametrize("plan", CODED_PLANS.values(), ids=CODED_PLANS)
def test_moments_in_8_bits_depend_on_neither_ranks_nor_chunks(plan, scratch):
    """Nor does a checkpoint in another form."""
    if WORLD.size > SHARDS:
        pytest.skip("at most as many ranks as virtual shards")
    with open_group(kind="solo") as solo, open_run(zr.Plan.zero(0), None, solo, SHARDS, **INT8) as rt:
        expected = train(rt, range(5))
        memory = rt.memory()
    assert memory.state / memory.parameter * 2 < 4.2 + 10 * 41 / 6400  # the bias stays as it is
    with open_run(plan, f"{scratch}/a", None, SHARDS, **INT8) as rt:
        assert train(rt, range(3)) == expected[:3]
        rt.save(f"{scratch}/coded")
        assert train(rt, range(3, 4)) == expected[3:4]
    with open_run(plan, f"{scratch}/b", None, SHARDS, **INT8) as rt:  # the codes themselves
        rt.load(f"{scratch}/coded")
        assert train(rt, range(3, 5)) == expected[3:]
    with open_run(plan, f"{scratch}/c", None, SHARDS) as rt:  # decoded: an update of the same moments
        rt.load(f"{scratch}/coded")
        assert train(rt, range(3, 4)) == expected[3:4]
        rt.save(f"{scratch}/whole")
    found = []
    for again, group in ((plan, None), (zr.Plan.zero(0), open_group(kind="solo"))):
        with open_run(again, f"{scratch}/d{WORLD.rank if group else ''}", group, SHARDS, **INT8) as rt:
            rt.load(f"{scratch}/whole")
            found.append(train(rt, range(4, 6)))
        if group:
            group.close()
    assert found[0] == found[1]  # coded alike, whoever reads which part
    assert found[0][0] != expected[4]


def test_a_report_says_that_moments_are_coded(scratch):
    with open_run(PLANS["zero3"], scratch, **INT8) as rt:
        rt.units["v"].reduce({"v": np.ones(SHAPES["v"], BFLOAT16)})
        report = rt.step()
        assert report.state == "int8 moments"
        assert "int8 moments; " in str(report)
    with open_run(PLANS["zero3"], scratch, master="remainder") as rt:
        rt.units["v"].reduce({"v": np.ones(SHAPES["v"], BFLOAT16)})
        assert rt.step().state == ""


def test_what_is_written_into_parameters_is_what_masters_are(scratch):
    with open_run(PLANS["state-nvme"], scratch, master="remainder") as rt:
        train(rt, range(2))
        new = lot(7).standard_normal(SHAPES["v"]).astype(BFLOAT16)
        rt.units["v"].assign({"v": new})
        rt.save(f"{scratch}/saved")
    with zr.open(zr.Plan.zero(0), zr.AdamW(lr=0.1)) as rt:
        for name, shape in SHAPES.items():
            rt.register(name, {name: zr.TensorSpec(shape, "float32")})
        rt.load(f"{scratch}/saved")
        with rt.units["v"].gathered() as p:
            np.testing.assert_array_equal(p["v"], new.astype(np.float32))
        with rt.units["w"].gathered() as p:
            assert (p["w"] != p["w"].astype(BFLOAT16).astype(np.float32)).any()


def test_forms_that_a_parameter_cannot_have_are_refused_everywhere(scratch):
    with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1, master="remainder")) as rt:
        text = (
            r"Expected parameters in bfloat16 with master='remainder' of AdamW, got 'unit.w' in float32. Convert it, "
            r"or .*zr.ParameterGroup\('unit.w', master='float32'\)"
        )
        with pytest.raises(CallError, match=text):
            rt.register("unit", {"w": np.zeros(8, np.float32)})
        assert not rt.units
        rt.register("unit", {"w": np.zeros(8, BFLOAT16), "base": np.zeros(8, np.float32)}, frozen="base")
    with zr.open(zr.Plan.zero(3), zr.AdamW(lr=0.1, moments="int8")) as rt:
        with pytest.raises(CallError, match=r"with moments='int8' of AdamW, got 'unit.w' in float64\. Convert it, or"):
            rt.register("unit", {"w": np.zeros(8)})
        assert not rt.units
    with pytest.raises(CallError, match=r"to override fields of SGD .*got 'moments'"):
        zr.open(zr.Plan.zero(3), zr.SGD(lr=0.1), param_groups=[zr.ParameterGroup("*", moments="int8")])
    with pytest.raises(CallError, match="Expected master to be 'float32' or 'remainder', got 'bf16'"):
        zr.AdamW(lr=0.1, master="bf16")
    with pytest.raises(CallError, match=r"to override fields of SGD .*got 'master'"):
        zr.open(zr.Plan.zero(3), zr.SGD(lr=0.1), param_groups=[zr.ParameterGroup("*", master="remainder")])
