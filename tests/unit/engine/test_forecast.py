"""What is told before a run is what is there in it; the same on GPUs: tests/cuda/ranks/test_forecast_on_gpus.py."""

from dataclasses import replace

import numpy as np
import pytest

import zerort as zr
from zerort.testing.contracts.forecast import ForecastContract
from zerort.testing.threads import run_threads
from zerort.testing.threads_transport import ThreadsTransport


def expect_on_threads(ranks, test, *arguments):
    """Run a test of the contract on ranks that are threads: what it asserts, it asserts on each."""
    run_threads(ranks, lambda group: test(group, *arguments))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_count_what_was_told(stage, tmp_path):
    expect_on_threads(2, ForecastContract().test_a_runtime_counts_what_was_told, tmp_path, stage)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_ranks_count_what_was_told_of_a_fixed_tree(ranks, accumulate, tmp_path):
    expect_on_threads(ranks, ForecastContract().test_a_fixed_tree_is_counted, tmp_path, accumulate)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_count_what_was_told_of_copies(ranks, tmp_path):
    expect_on_threads(ranks, ForecastContract().test_copies_are_counted, tmp_path)


@pytest.mark.parametrize(
    ("parameter", "gather", "reduce"),
    [
        (zr.Tier.DEVICE, "int8", "int8"),
        (zr.Tier.DEVICE, "int4", "int8"),  # as differences, of a whole that stays
        (zr.Tier.NVME, "int8", "int8"),
        (zr.Tier.DEVICE, "int4", zr.TopK(0.02)),
        (zr.Tier.DEVICE, "int4", None),
    ],
)
def test_codes_are_counted_as_told(parameter, gather, reduce, tmp_path):
    plan = zr.Plan.zero(3, parameter=parameter)
    wire = zr.Wire(gather=gather, reduce=reduce, feedback=True, over="all")
    run_threads(3, lambda group: ForecastContract().expect_as_told(group, tmp_path, plan, wire=wire))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("hosts", [(0, 0, 1), (4, 3, 4)])
def test_sums_within_hosts_are_counted_as_told(nonfinite, hosts, tmp_path, monkeypatch):
    """Slices of all ranks of a host, their sum in 32 bits, and one residual per host between its ranks."""
    monkeypatch.setattr(ThreadsTransport, "one_memory", False)
    monkeypatch.setattr(ThreadsTransport, "memories", hosts)
    way = replace(ForecastContract.ways[0], options={"nonfinite": nonfinite})
    plan, wire = zr.Plan.zero(3), zr.Wire(reduce="int4", feedback=True)
    run_threads(3, lambda group: ForecastContract().expect_as_told(group, tmp_path, plan, way=way, wire=wire))


@pytest.mark.parametrize("options", [{"virtual_shards": 5}, {"virtual_shards": 5, "nonfinite": "skip"}])
def test_residuals_of_virtual_shards_are_counted_as_told(options, tmp_path):
    way = replace(ForecastContract.ways[0], options=options)
    plan, wire = zr.Plan.zero(3), zr.Wire(gather="int8", reduce="int4", feedback=True)
    run_threads(3, lambda group: ForecastContract().expect_as_told(group, tmp_path, plan, way=way, wire=wire))


@pytest.mark.parametrize("numel", [100, 3000, 9000])
def test_streams_of_fewer_chunks_than_slots_are_counted_as_told(numel, tmp_path):
    """A step may stream one chunk where there is room for several; a rank without a shard has no room at all."""
    plan, shard_weights = zr.Plan.zero(2, state=zr.Tier.NVME), (1, 1, 0)
    offload = zr.OffloadOptions(chunk_nbytes=8192, depth=3, threads=1)  # chunks of 2048 elements
    tensors = {"w": zr.TensorSpec((numel,))}
    how = {"optimizer": zr.AdamW(lr=0.1), "offload": offload, "shard_weights": shard_weights}

    def body(group):
        with zr.open(plan, group=group, scratch=tmp_path, **how) as rt:
            rt.register("unit", tensors).reduce({"w": np.ones(numel, np.float32)})
            rt.step()
            told = zr.forecast({"unit": tensors}, plan=plan, size=3, rank=rt.rank, **how)
            return rt.memory().streaming, told.streaming

    for counted, told in run_threads(3, body):
        assert counted == told
