"""What is told before a run is what is there in it; the same on GPUs: tests/cuda/ranks/test_forecast_on_gpus.py."""

import pytest

import zerort as zr
from zerort.testing.contracts.forecast import ForecastContract
from zerort.testing.threads import run_threads


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_count_what_was_told(stage, tmp_path):
    run_threads(2, lambda group: ForecastContract().test_a_runtime_counts_what_was_told(group, tmp_path, stage))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_ranks_count_what_was_told_of_a_fixed_tree(ranks, accumulate, tmp_path):
    run_threads(ranks, lambda group: ForecastContract().test_a_fixed_tree_is_counted(group, tmp_path, accumulate))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_count_what_was_told_of_copies(ranks, tmp_path):
    run_threads(ranks, lambda group: ForecastContract().test_copies_are_counted(group, tmp_path))


@pytest.mark.parametrize("parameter", [zr.Tier.DEVICE, zr.Tier.NVME])
def test_codes_are_counted_as_told(parameter, tmp_path):
    plan, wire = zr.Plan.zero(3, parameter=parameter), zr.Wire(gather="int4", reduce="int8", feedback=True, over="all")
    run_threads(3, lambda group: ForecastContract().expect_as_told(group, tmp_path, plan, wire=wire))
