"""Parameters as int4 codes of differences between GPUs: the host's bits on every rank, and one gather per update."""

import gpu_runs
import hardware
import numpy as np
import pytest

pytest.importorskip("cupy")

import zerort as zr
from zerort.codec import INT4
from zerort.comm import open_group
from zerort.errors import PlanError
from zerort.native.dtypes import numpy_dtype
from zerort.testing.contracts.forecast import ForecastContract

pytestmark = [pytest.mark.mpi, gpu_runs.at_most(3)]

HOST, NVME = zr.Tier.HOST, zr.Tier.NVME
WIRE = zr.Wire(gather="int4", feedback=True, over="all")
PLAIN = zr.Plan.zero(3)
SHAPES = {"w": (37, 41), "b": (41,), "scale": (), "empty": (0, 3), "long": (3001,)}  # odd, 1-D, one, none


@pytest.fixture(scope="module")
def hosts(options):
    with open_group(options=options) as group:
        yield group


def values_of(seed, dtype):
    lot = np.random.default_rng(seed)
    return {name: lot.standard_normal(shape).astype(numpy_dtype(dtype)) for name, shape in SHAPES.items()}


class Run:
    """A runtime on hosts or GPUs, and the bits of what it gathers."""

    def __init__(self, group, *, plan=PLAIN, dtype="float32", wire=WIRE, **options):
        self.rt, self.dtype = (
            zr.open(plan, zr.AdamW(lr=0.1), group=group, wire=wire, virtual_shards=3, **options),
            dtype,
        )
        self.units = [self.rt.register(f"unit{at}", values_of(at, dtype)) for at in range(3)]
        self.found, self.reports = [], []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.rt.close()

    def step(self, seed):
        for shard in self.rt.micro_batches:
            for at, unit in enumerate(self.units):
                gradients = values_of(1000 * seed + 10 * at + shard, self.dtype)
                unit.reduce({name: self._there(value) for name, value in gradients.items()})
        self.reports.append(self.rt.step())

    def look(self):
        """Gather forwards and backwards; the second time there is nothing to be done."""
        for unit in (*self.units, *self.units[::-1]):
            with unit.gathered() as p:
                self.found.append({name: self.rt.device.fetch(p[name]).tobytes() for name in unit.names})

    def _there(self, value):
        out = self.rt.device.zeros(value.size, value.dtype)
        self.rt.device.put(value.reshape(-1), out=out)
        return out.reshape(value.shape)


def story(group, path, **options):
    """Train, and change parameters in all other ways that there are; return the bits after each, and the reports."""
    with Run(group, **options) as run:
        run.look()
        for seed in (1, 2):
            run.step(seed)
            run.look()
        odd = values_of(50, run.dtype)
        odd["w"].reshape(-1)[:3] = np.nan, -0.0, np.inf
        for values in (odd, values_of(51, run.dtype)):
            run.units[1].assign(values)
            run.look()
        run.step(3)
        run.rt.save(path)  # what was gathered is behind
        run.step(4)
        run.look()
        run.rt.load(path)
        run.look()
        run.rt.rebalance(shard_weights=[(rank * 2 + 1) % 3 for rank in range(run.rt.size)])  # 1 0 2: one has none
        run.look()
        run.step(5)
        run.look()
        return run.found, run.reports


CASES = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "state-on-host": {"plan": zr.Plan.zero(3, state=HOST, gradient=HOST)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_differences_between_gpus_make_the_hosts_bits(gpus, hosts, case, shared_tmp_path):
    """Trained, assigned, saved, loaded and cut anew; codes of each update cross the wire once."""
    if gpus.size != 2 and case:
        pytest.skip("two ranks show it")
    hardware.reseed(1 + gpus.size)  # streams come in another order
    found, reports = story(gpus, shared_tmp_path / "gpus", **case)
    hardware.reseed(0)
    expected, on_hosts = story(hosts, shared_tmp_path / "hosts", **case)
    assert found == expected
    assert [report.digest for report in reports] == [report.digest for report in on_hosts]
    assert {report.wire for report in reports} == {"gather int4, feedback"}
    if gpus.size > 1:
        width = numpy_dtype(case.get("dtype", "float32")).itemsize
        numel = sum(int(np.prod(shape)) for shape in SHAPES.values())
        assert reports[1].bytes_uncoded["all_gather"] >= 3 * width * numel
        assert reports[1].bytes_moved["all_gather"] == pytest.approx(
            reports[1].bytes_uncoded["all_gather"] * INT4.nbytes(1024) / (1024 * width), rel=0.01
        )


def test_differences_on_gpus_go_on_from_a_checkpoint(gpus, hosts, shared_tmp_path):
    """Behind the last update, or up to date with it; also one that was written on hosts."""
    with Run(gpus) as run:
        for seed in range(4):
            run.step(seed)
            if seed == 1:
                run.look()
        run.look()
        through = run.found[-1]
    for group, name, gathers in ((gpus, "behind", False), (gpus, "current", True), (hosts, "hosts", True)):
        with Run(group) as run:
            for seed in (0, 1):
                run.step(seed)
            if gathers:
                run.look()
            run.rt.save(shared_tmp_path / name)
        with Run(gpus) as run:
            run.rt.load(shared_tmp_path / name)
            run.look()
            for seed in (2, 3):
                run.step(seed)
            run.look()
            assert run.found[-1] == through, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_without_differences_begins_with_zeros_on_gpus(gpus, dtype, shared_tmp_path):
    with Run(gpus, dtype=dtype, wire=None) as run:
        run.rt.save(shared_tmp_path / "plain")
    with Run(gpus, dtype=dtype) as run:
        run.look()
        first = list(run.found)
        run.step(1)
        run.look()
        run.rt.load(shared_tmp_path / "plain")
        run.found.clear()
        run.look()
        assert run.found == first


def test_gpus_of_two_hosts_send_differences_and_those_of_one_do_not(gpus, gpus_of_two_hosts, shared_tmp_path):
    class OnGpus(ForecastContract):
        device = "cuda"

    wire = zr.Wire(gather="int4", reduce="int8", feedback=True)
    assert gpus.one_host > gpus_of_two_hosts.one_host
    for group in (gpus, gpus_of_two_hosts):
        told = OnGpus().expect_as_told(group, shared_tmp_path, PLAIN, wire=wire)
        assert bool(told.host_copy) != group.one_host


def test_bytes_of_differences_on_gpus_are_those_of_the_forecast(gpus, shared_tmp_path):
    class OnGpus(ForecastContract):
        device = "cuda"

    for plan in (PLAIN, zr.Plan.zero(3, state=HOST)):
        told = OnGpus().expect_as_told(gpus, shared_tmp_path, plan, wire=WIRE)
        assert told.host_copy > 0


@pytest.mark.parametrize("tier", [HOST, NVME])
def test_differences_of_parameters_that_are_not_on_the_gpu_are_refused(gpus, tier):
    message = f"memory of GPUs with Wire.gather='int4', feedback=True.*, got parameters on {tier.name}.*gather='int8'"
    with pytest.raises(PlanError, match=message):
        zr.open(zr.Plan.zero(3, parameter=tier), group=gpus, wire=WIRE)
