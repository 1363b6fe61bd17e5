"""Tied parameters under sharded plans: each unit's gradients are reduced into the shard by themselves."""

import time
import tracemalloc

import numpy as np
import pytest
from runs import faults

import zerort as zr
from zerort.codec.formats import Format
from zerort.errors import CallError, NonFiniteError, StorageError, UnitStateError
from zerort.testing import run_threads
from zerort.testing.contracts.ties import TIED_UNITS, TiesContract, register_tied, tied_gradients, tied_totals

F4 = np.float32
MEMORY, DISK = zr.Tier.DEVICE, zr.Tier.NVME
TABLE = (130, 70)


def opened(group, tmp_path, *, stage=3, gradient=MEMORY, chunk_nbytes=16 * 1024, **options):
    plan = zr.Plan.zero(stage, gradient=gradient)
    settings = {"optimizer": zr.SGD(lr=1.0), "scratch": tmp_path, "reduction": "sum", **options}
    return zr.open(plan=plan, group=group, offload=zr.OffloadOptions(chunk_nbytes=chunk_nbytes), **settings)


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize(("stage", "gradient"), [(2, MEMORY), (3, DISK)])
def test_tied_gradients_on_threads(size, stage, gradient, micro_steps, tmp_path):
    expect_added = TiesContract().test_gradients_of_tied_units_are_added_where_they_rest
    run_threads(size, lambda group: expect_added(group, tmp_path, stage, gradient, micro_steps))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_holds_one_shard_and_buckets_whatever_is_tied(stage, tmp_path):
    numel = 500_000

    def body(group):
        with opened(group, tmp_path, stage=stage, micro_steps=3) as rt:
            embed = rt.register("embed", {"table": zr.TensorSpec((numel,))})
            heads = [
                rt.register(f"head{at}", {"b": zr.TensorSpec((5,))}, ties={"w": (embed, "table")}) for at in range(3)
            ]
            gradient = np.ones(numel, F4)
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                for _ in range(3):
                    for unit in (*heads, embed):
                        unit.reduce({name: np.ones(5, F4) if name == "b" else gradient for name in unit.trainable})
                rt.units.wait_for_reductions()
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            rt.discard_gradients()
            return most - before, rt.memory()

    # One rank: what the threads of others hold would be counted, too.
    ((most, memory),) = run_threads(1, body)
    assert memory.gradient == 4 * (500_032 + 3 * 64)
    assert most < memory.gradient + memory.buckets + 2**19


def test_fixed_trees_of_tied_tensors_rest_where_gradients_do(tmp_path):
    numel = 500_000

    def body(group):
        with opened(group, tmp_path, gradient=DISK, virtual_shards=6, chunk_nbytes=2**18) as rt:
            embed = rt.register("embed", {"table": zr.TensorSpec((numel,))})
            before = rt.memory().nvme
            head = rt.register("head", {}, ties={"w": (embed, "table")})
            gradient = np.ones(numel, F4)
            tracemalloc.start()
            try:
                start, _ = tracemalloc.get_traced_memory()
                for _ in rt.micro_batches:
                    head.reduce({"w": gradient})
                    embed.reduce({"table": gradient})
                rt.units.wait_for_reductions()
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            rt.step()
            with embed.gathered() as p:
                np.testing.assert_array_equal(p["table"], -12 * gradient)
            return most - start, before, rt.memory()

    ((most, before, memory),) = run_threads(1, body)
    assert memory.gradient == 0
    assert memory.nvme == 2 * before
    assert most < memory.buckets + 2**19


def test_a_disk_without_room_for_a_tied_tree_refuses_the_unit_and_one_that_fails_the_step(tmp_path):
    def body(group):
        with opened(group, tmp_path, gradient=DISK, virtual_shards=4) as rt:
            embed = rt.register("embed", {"table": zr.TensorSpec(TABLE)})
            fault = "enospc@2:op=reserve:times=all:file=-r1-"
            with faults(group, fault), pytest.raises(StorageError, match="tied0"):
                rt.register("head", {}, ties={"w": (embed, "table")})
            assert "head" not in rt.units
            assert not [path for path in tmp_path.rglob("*") if "tied" in path.name]
            head = rt.register("head", {}, ties={"w": (embed, "table")})

            def take_step():
                for _ in rt.micro_batches:
                    embed.reduce({"table": np.ones(TABLE, F4)})
                    head.reduce({"w": np.ones(TABLE, F4)})
                return rt.step()

            for fault in ("enospc@1:op=write:times=all:file=tied", "eio@1:op=read:times=all:file=tied"):
                with faults(group, fault), pytest.raises(StorageError, match="tied0"):
                    take_step()
            assert take_step().update == 1
            with embed.gathered() as p:
                np.testing.assert_array_equal(p["table"], np.full(TABLE, -8, F4))

    run_threads(2, body)


@pytest.mark.parametrize("gradient", [MEMORY, DISK])
def test_a_gradient_that_only_a_tied_unit_has(gradient, tmp_path):
    def body(group):
        with opened(group, tmp_path, gradient=gradient) as rt:
            units = register_tied(rt)
            units["head"].reduce({"out": np.ones(TABLE, F4)} if rt.rank == 1 else {})
            units["embed"].reduce({})
            units["block"].reduce({})
            assert rt.step().without_gradient == ("embed.before", "embed.after", "block.w", "head.b")
            with units["embed"].gathered() as p:
                np.testing.assert_array_equal(p["table"], -np.ones(TABLE, F4))

    run_threads(3, body)


@pytest.mark.parametrize("gradient", [MEMORY, DISK])
def test_a_tied_gradient_that_is_not_finite_is_named(gradient, tmp_path):
    def body(group):
        with opened(group, tmp_path, gradient=gradient) as rt:
            units = register_tied(rt)
            for name in TIED_UNITS:
                given = tied_gradients(name, rt.rank, 0)
                if name == "head" and rt.rank == 1:
                    given["out"][3, 4] = np.nan
                units[name].reduce(given)
            with pytest.raises(NonFiniteError, match=r"gradient of 'embed\.table' on rank 1"):
                rt.step()
            for name in TIED_UNITS:  # finite on each rank, and infinite as a sum
                given = tied_gradients(name, rt.rank, 0)
                if name != "block":
                    given["table" if name == "embed" else "out"][0, 0] = 3e38
                units[name].reduce(given)
            with pytest.raises(NonFiniteError, match=r"gradient of 'embed\.table', summed over the ranks"):
                rt.step()

    run_threads(2, body)


@pytest.mark.parametrize("accumulate", ["sharded", "local"])
def test_a_tied_unit_with_a_micro_step_too_few_or_too_many_is_named_on_every_rank(accumulate, tmp_path):
    def body(group):
        with opened(group, tmp_path, micro_steps=2, accumulate=accumulate) as rt:
            units = register_tied(rt)
            for name in ("embed", "embed", "block", "head"):
                units[name].reduce({})
            text = r"Expected 2 reduce\(\) of unit 'block', which is tied to unit 'embed', before step\(\), got 1"
            with pytest.raises(UnitStateError, match=text):
                rt.step()
        with opened(group, tmp_path, micro_steps=2, accumulate=accumulate) as rt:
            units = register_tied(rt)
            for name in (*TIED_UNITS, *TIED_UNITS):
                units[name].reduce({})
            if rt.rank == 0:
                with pytest.raises(UnitStateError, match=r"Expected at most 2 reduce\(\) of unit 'embed' per step"):
                    units["embed"].reduce({})
            else:
                with pytest.raises(CallError, match="unit 'embed' per step"):
                    rt.step()

    run_threads(2, body)


def test_a_rank_without_the_tied_gradients_reduction_keeps_nobody_waiting(tmp_path):
    def body(group):
        with opened(group, tmp_path) as rt:
            units = register_tied(rt)
            for name in TIED_UNITS if rt.rank else TIED_UNITS[:2]:
                units[name].reduce({})
            with pytest.raises(
                (UnitStateError, CallError), match=r"1 reduce\(\) of unit 'head', which is tied to unit 'embed'"
            ):
                rt.step()

    run_threads(2, body)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_copies_of_the_model_sum_tied_gradients_once(stage, micro_steps, tmp_path):
    def body(group):
        mesh = zr.mesh(replicate=2, group=group)
        with zr.open(
            plan=zr.Plan.zero(stage), mesh=mesh, optimizer=zr.SGD(lr=1.0), reduction="sum", micro_steps=micro_steps
        ) as rt:
            units = register_tied(rt)
            totals = tied_totals(4, micro_steps)
            for step, order in enumerate((("head", "block", "embed"), ("embed", "block", "head")), 1):
                for at in range(micro_steps):
                    for name in order:
                        units[name].reduce(tied_gradients(name, rt.rank, at))
                assert rt.step().updated
                for (unit, name), total in totals.items():
                    with units[unit].gathered() as p:
                        np.testing.assert_array_equal(p[name], -step * total)

    run_threads(4, body)


@pytest.mark.parametrize(
    ("ties", "text"),
    [
        (
            {"head": {"w": ("embed", "nope")}},
            r"Expected to tie 'w' of unit 'head' to a parameter of a unit, got 'nope'",
        ),
        ({"head": {"w": ("nope", "table")}}, r"got 'table' of 'nope'"),
        ({"a": {"w": ("b", "w")}, "b": {"w": ("a", "w")}}, r"Expected to tie 'w' of unit 'a'"),
        ({"head": ("embed", "table")}, r"Expected ties by unit and name"),
        (["embed"], r"Expected ties by unit and name"),
    ],
)
def test_a_forecast_refuses_ties_that_lead_nowhere(ties, text):
    settings = {"plan": zr.Plan.zero(3), "optimizer": zr.SGD(lr=1.0), "size": 2}
    with pytest.raises(CallError, match=text):
        zr.forecast({"embed": {"table": zr.TensorSpec((3,))}}, ties=ties, **settings)


def test_a_tied_gradient_is_added_when_the_first_one_is_decoded(tmp_path, monkeypatch):
    decode_sum = Format.decode_sum

    def slow_decode_sum(self, out, payloads):
        time.sleep(0.1)
        decode_sum(self, out, payloads)

    monkeypatch.setattr(Format, "decode_sum", slow_decode_sum)

    def body(group):
        with opened(group, tmp_path, wire=zr.Wire(reduce="bfloat16", over="all"), buckets=2) as rt:
            embed = rt.register("embed", {"table": np.zeros(256, F4)})
            head = rt.register("head", {}, ties={"w": (embed, "table")})
            embed.reduce({"table": np.full(256, 1, F4)})
            head.reduce({"w": np.full(256, 2, F4)})
            report = rt.step()
            assert report.wire.endswith("; gradients of tied tensors travel uncoded from other units")
            with embed.gathered() as parameters:
                return np.unique(parameters["table"]).tolist()

    assert run_threads(2, body) == [[-6.0], [-6.0]]


@pytest.mark.parametrize(("stage", "accumulate"), [(1, "local"), (2, "sharded"), (3, "local"), (3, "sharded")])
@pytest.mark.parametrize("skipped", ["home home", "- home", "home -", "- other", "other other", "both both"])
def test_a_micro_step_that_is_skipped_by_hand_counts_as_zeros(stage, accumulate, skipped, tmp_path):
    """Of the unit that holds a tied tensor, of the one that is tied to it, or of both."""

    def body(group, *, skips):
        with opened(group, tmp_path, stage=stage, micro_steps=2, accumulate=accumulate) as rt:
            home = rt.register("home", {"w": np.arange(300.0)})
            other = rt.register("other", {"b": np.ones(3)}, ties={"w": (home, "w")})
            for at, word in enumerate(skipped.split()):
                for unit, gradients in ((other, {"w": (300,), "b": (3,)}), (home, {"w": (300,)})):
                    if word not in (unit.name, "both"):
                        unit.reduce({name: np.full(shape, 1.0 + at + rt.rank) for name, shape in gradients.items()})
                    elif skips:
                        unit.skip_micro_step()
                    else:
                        unit.reduce({})
            norm = rt.step().grad_norm
            with other.gathered() as p:
                return norm, p["w"].tolist(), p["b"].tolist()

    both = [run_threads(2, lambda group, skips=skips: body(group, skips=skips)) for skips in (False, True)]
    assert both[0] == both[1]
