"""Copies of the model: sums over them follow each unit's own reduction, and nobody waits for one that never comes."""

import json
import time

import numpy as np
import pytest
from runs import NVME, SMALL, faults

import zerort as zr
from zerort.engine.step.discard import forget_gradients
from zerort.errors import CallError, CollectiveError, StorageError, UnitStateError
from zerort.testing import run_threads

F4 = np.float32
DEADLINE = 60.0
"""Seconds, for what happens by itself: nothing here takes as long, on any machine."""


def ones(numel):
    return np.ones(numel, F4)


def opened(group, *, shard=2, stage=3, **options):
    """Open a runtime over copies of a model of three units."""
    ranks = zr.mesh(shard=shard, replicate=group.size // shard, group=group)
    rt = zr.open(mesh=ranks, plan=zr.Plan.zero(stage), optimizer=zr.SGD(lr=1.0), reduction="sum", **options)
    for name in "abc":
        rt.register(name, {"w": np.zeros(100, F4)})
    return rt


def sums_over_copies(rt, directory):
    """Return the sums over copies that were made, as the group's flight record has them: (name, how it ended)."""
    path = rt.mesh.replicate.flight_record(directory)
    calls = json.loads(path.read_text())["calls"]
    return [(call["name"].split()[0], call["status"]) for call in calls if call["op"] == "all_reduce"]


def until(rt, directory, expected):
    """Wait until the sums over copies are these, without a call that would help them along."""
    give_up = time.monotonic() + DEADLINE
    while sums_over_copies(rt, directory) != expected and time.monotonic() < give_up:
        time.sleep(0.01)
    assert sums_over_copies(rt, directory) == expected


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("shard", [1, 2])
def test_each_units_sum_over_copies_follows_its_own_before_the_step(stage, shard, tmp_path):
    def body(group):
        directory = tmp_path / str(group.rank)
        with opened(group, shard=shard, stage=stage) as rt:
            made = []
            for name in "cab":  # in the order of reductions, not of registration
                rt.units[name].reduce({"w": (rt.rank + 1) * ones(100)})
                made.append((name, "done"))
                until(rt, directory, made)  # on all ranks, and none has come to the next
            report = rt.step()
            assert sums_over_copies(rt, directory) == made  # no further one
            assert report.bytes_moved["all_reduce"] == bytes_over_copies(rt, stage)
            for name in "abc":
                with rt.units[name].gathered() as p:
                    np.testing.assert_array_equal(p["w"], -10 * ones(100))

    run_threads(4, body)


def bytes_over_copies(rt, stage):
    """Return what the three units' sums over copies are: of shards, or of all; and of all over one copy, in ZeRO-0."""
    within = 3 * 128 * 4 * (stage == 0 and rt.mesh.shard.size > 1)
    return within + 3 * 4 * (128 if stage == 0 else 128 // rt.mesh.shard.size)


def test_micro_steps_are_summed_over_copies_with_the_last(tmp_path):
    def body(group):
        directory = tmp_path / str(group.rank)
        with opened(group, micro_steps=2) as rt:
            for name in "abc":
                rt.units[name].reduce({"w": ones(100)})
            group.barrier().wait()
            assert sums_over_copies(rt, directory) == []
            rt.units["b"].reduce({"w": ones(100)})
            until(rt, directory, [("b", "done")])
            for name in "ac":
                rt.units[name].reduce({"w": ones(100)})
            rt.step()
            with rt.units["a"].gathered() as p:
                np.testing.assert_array_equal(p["w"], -8 * ones(100))

    run_threads(4, body)


def test_gradients_that_rest_partial_are_summed_over_copies_in_the_step():
    def body(group):
        with opened(group, stage=1) as rt:
            for name in "abc":
                rt.units[name].reduce({"w": ones(100)})
            rt.step()
            with rt.units["b"].gathered() as p:
                np.testing.assert_array_equal(p["w"], -4 * ones(100))

    run_threads(4, body)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_without_gradients_leaves_nothing_behind(stage):
    def body(group):
        with opened(group, stage=stage, micro_steps=2) as rt:
            for gradients in ({}, {"w": ones(100)}):
                for name in "abcabc":
                    rt.units[name].reduce(gradients)
                assert rt.step().updated is bool(gradients)
            with rt.units["a"].gathered() as p:
                np.testing.assert_array_equal(p["w"], -8 * ones(100))

    run_threads(4, body)


@pytest.mark.parametrize("verb", ["step", "discard"])
@pytest.mark.parametrize(
    "lacking",
    [{2: "b", 3: "b"}, {0: "bc", 1: "bc"}, {1: "b"}, {0: "a", 3: "c"}, {1: "abc"}],
    ids=["a copy", "most of a copy", "a rank", "two ranks", "all of a rank"],
)
def test_ranks_that_reduced_other_units_are_told_and_go_on(lacking, verb):
    def body(group):
        with opened(group, buckets=3) as rt:  # so many that no reduction waits for the one before
            for name in "abc":
                if name not in lacking.get(rt.rank, ""):
                    rt.units[name].reduce({"w": 100 * ones(100)})
            if verb == "step":
                with pytest.raises(UnitStateError, match=r"on every rank or on none|Expected gradients before step"):
                    rt.step()
            else:
                rt.discard_gradients()
            for name in "abc":  # nothing is left over from before
                rt.units[name].reduce({"w": ones(100)})
            assert rt.step().updated
            for name in "abc":
                with rt.units[name].gathered() as p:
                    np.testing.assert_array_equal(p["w"], -4 * ones(100))

    run_threads(4, body)


@pytest.mark.parametrize("lacking", [{0: "a"}, {0: "a", 3: "c"}, {2: "a", 3: "a"}])
def test_ranks_that_wait_for_a_bucket_meanwhile_are_told_too(lacking):
    def train(rt):
        for name in "abc":
            if name not in lacking.get(rt.rank, ""):
                rt.units[name].reduce({"w": ones(100)})
        rt.step()

    def body(group):
        with opened(group, buckets=1) as rt, pytest.raises(UnitStateError, match="on every rank or on none"):
            train(rt)

    run_threads(4, body)


def test_copies_that_reduce_in_different_orders_are_told():
    def body(group):
        with opened(group) as rt:
            for name in "abc" if rt.mesh.copy else "acb":
                rt.units[name].reduce({"w": ones(100)})
            with pytest.raises(CollectiveError, match="all_reduce"):
                rt.step()
            for name in "abc":
                rt.units[name].reduce({"w": ones(100)})
            assert rt.step().updated

    run_threads(4, body)


def test_a_wrong_gradient_leaves_no_copy_waiting():
    def body(group):
        with opened(group) as rt:
            rt.units["a"].reduce({"w": ones(100)})
            wrong = rt.rank == 0
            if not wrong:
                rt.units["b"].reduce({"w": ones(100)})
            with pytest.raises(CallError, match=r"shape \[100\], got \[99\]"):
                rt.units["b"].reduce({"w": ones(99)}) if wrong else rt.step()
            if wrong:
                forget_gradients(rt.context, rt.units)
            for name in "abc":
                rt.units[name].reduce({"w": ones(100)})
            assert rt.step().updated

    run_threads(4, body)


# -- gradients on a disk -----------------------------------------------------------------------------------------------

ROWS, WIDTH = 90, 70
NBYTES = 4 * 6336
"""Of the table and its padding: several chunks."""


def train_tied(group, scratch, gradient, *, shard, micro_steps):
    """Train copies of a model with a tied table; return its weights and the last report."""
    ranks = zr.mesh(shard=shard, replicate=group.size // shard, group=group)
    options = {"optimizer": zr.AdamW(lr=0.1), "clip_norm": 1.0, "micro_steps": micro_steps, "offload": SMALL}
    with zr.open(zr.Plan.zero(3, gradient=gradient), mesh=ranks, scratch=scratch, **options) as rt:
        start = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(F4)
        embed = rt.register("embed", {"table": start})
        head = rt.register("head", {"b": np.ones(9, F4)}, ties={"w": (embed, "table")})
        for step in range(2):
            for micro_step in range(micro_steps):
                noise = np.random.default_rng((step, micro_step, rt.rank))
                head.reduce({"w": noise.normal(size=(ROWS, WIDTH)).astype(F4), "b": noise.normal(size=9).astype(F4)})
                embed.reduce({"table": noise.normal(size=(ROWS, WIDTH)).astype(F4)})
            found = embed.reduced_gradients()["table"] if step else None
            report = rt.step()
        with embed.gathered() as p, head.gathered() as q:
            return p["table"].copy(), q["b"].copy(), found, report


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("shard", [1, 2])
def test_gradients_on_a_disk_are_summed_over_copies_to_the_bits_of_memory(shard, micro_steps, tmp_path):
    def body(group):
        in_memory, on_disk = (
            train_tied(group, tmp_path, tier, shard=shard, micro_steps=micro_steps) for tier in (zr.Tier.DEVICE, NVME)
        )
        for found, expected in zip(on_disk[:3], in_memory[:3], strict=True):
            np.testing.assert_array_equal(found, expected)
        assert on_disk[3].grad_norm == in_memory[3].grad_norm
        assert on_disk[3].bytes_moved == in_memory[3].bytes_moved

    run_threads(2 * shard, body)


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_sum_over_copies_reads_and_writes_gradients_on_a_disk_once(micro_steps, tmp_path):
    def body(group):
        ranks = zr.mesh(replicate=2, group=group)
        with zr.open(
            zr.Plan.zero(3, gradient=NVME), mesh=ranks, scratch=tmp_path, micro_steps=micro_steps, offload=SMALL
        ) as rt:
            unit = rt.register("a", {"w": np.zeros((ROWS, WIDTH), F4)})
            for _ in range(micro_steps):
                unit.reduce({"w": np.ones((ROWS, WIDTH), F4)})
                assert sums_over_copies(rt, tmp_path / str(rt.rank)) == []
            report = rt.step()
            names = [name for name, _ in sums_over_copies(rt, tmp_path / str(rt.rank))]
            assert names == ["a"] * (rt.memory().nvme // SMALL.chunk_nbytes + 1)  # one for each chunk
            reads, writes = micro_steps - 1 + 1 + 1, micro_steps + 1  # added to, summed over copies, updated
            assert report.bytes_tiered == {"nvme read": reads * NBYTES, "nvme write": writes * NBYTES}

    run_threads(2, body)


@pytest.mark.parametrize("options", [{}, {"virtual_shards": 6}], ids=["plain", "tree"])
@pytest.mark.parametrize("fault", ["eio@1:op=read:times=all", "enospc@3:op=write:times=all"])
def test_a_disk_that_fails_in_a_sum_over_copies_is_told_to_all_and_changes_nothing(fault, options, tmp_path):
    def body(group):
        ranks = zr.mesh(replicate=2, group=group)
        settings = {"scratch": tmp_path, "offload": SMALL, "reduction": "sum", "optimizer": zr.SGD(lr=1.0), **options}
        with zr.open(zr.Plan.zero(3, gradient=NVME), mesh=ranks, **settings) as rt:
            unit = rt.register("a", {"w": np.zeros((ROWS, WIDTH), F4)})

            def reduce_all():
                for _ in range(rt.micro_steps):
                    unit.reduce({"w": np.ones((ROWS, WIDTH), F4)})

            reduce_all()
            rt.units.wait_for_reductions()
            with faults(group, f"{fault}:file=-r1-"), pytest.raises(StorageError, match="on rank 1, got"):
                rt.step()
            reduce_all()
            assert rt.step().update == 1
            with unit.gathered() as p:
                np.testing.assert_array_equal(p["w"], np.full((ROWS, WIDTH), -rt.micro_batch_count, F4))

    run_threads(2, body)
