"""State in a host's memory that stays on its rank when shards are cut anew stays where it is (decision 0179)."""

from contextlib import nullcontext

import numpy as np
import pytest
import seams

import zerort as zr
from zerort.device.host.reserve import Reserve
from zerort.engine.rebalance import moving, recut
from zerort.engine.rebalance.room import expect_room
from zerort.errors import PlanError, StorageError
from zerort.layout import Partition
from zerort.testing import run_threads

SHAPES = {"a": {"w": (37, 300), "b": (5,)}, "c": {"w": (9000,)}}


@pytest.fixture(autouse=True)
def reserved():
    """Give small arrays what large ones have: addresses of their own, in which values stay."""
    with seams.inside(Reserve, LEAST_NBYTES=1):
        yield


def opened(group, *, dtype="float32", **options):
    usual = {"plan": zr.Plan.zero(1), "optimizer": zr.AdamW(lr=0.1), "virtual_shards": 3}
    rt = zr.open(group=group, **usual | options)
    for unit, shapes in SHAPES.items():
        rng = np.random.default_rng(len(shapes))
        rt.register(unit, {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()})
    return rt


def step(rt, number, dtype="float32"):
    for shard in rt.micro_batches:
        for unit, shapes in SHAPES.items():
            rng = np.random.default_rng((number, shard))
            rt.units[unit].reduce({name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()})
    return rt.step().digest


def digests(group, *, between, **options):
    with opened(group, **options) as rt:
        found = [step(rt, 0)]
        for number in (1, 2):
            between(rt)
            found.append(step(rt, number))
        return found


def test_without_addresses_of_their_own_values_are_copied():
    def runs(between):
        return run_threads(3, lambda group: digests(group, between=between))

    with seams.inside(Reserve, LEAST_NBYTES=1 << 40):
        assert runs(lambda rt: rt.rebalance(shard_weights=[3, 0, rt.updates])) == runs(lambda rt: None)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_state_that_stays_on_its_rank_does_not_move(moments):
    def addresses(rt):
        """Return where each element of this rank's state lies."""
        found = {}
        for section in rt.units.sections():
            for kind, column in section.state.columns.items():
                begin = column.memory.ctypes.data - column.first * column.dtype.itemsize
                found |= {(section.name, kind, at): begin for at in range(column.first, column.first + column.size)}
        return found

    def body(group):
        with opened(group, optimizer=zr.AdamW(lr=0.1, moments=moments), dtype="bfloat16") as rt:
            step(rt, 0, "bfloat16")
            before = addresses(rt)
            old = [section.state.columns["exp_avg"].memory for section in rt.units.sections() if moments == "float32"]
            rt.rebalance(shard_weights=[1, 4])
            after = addresses(rt)
            for array in old if rt.rank == 0 else ():  # pages that nobody uses have been given back
                assert array[:1024].any()
                assert not array[-2048:-1024].any()
            both = before.keys() & after.keys()
            assert both
            assert all(before[one] == after[one] for one in both)
            kinds = {kind for _, kind, _ in after}
            return len(after) - len(both), len(before) - len(both), len(kinds)

    (got, lost, kinds), (gets, loses, _) = run_threads(2, body)
    assert got == loses == 0
    assert lost == gets > 0
    assert kinds == 3


def test_a_move_that_fails_leaves_state_in_memory_as_it_was(tmp_path, monkeypatch):
    """Values have arrived beside those that were there, and go again."""
    move = recut.move

    def fail_behind(group, source, out, *args, **kwargs):
        found = move(group, source, out, *args, **kwargs)
        return StorageError("EIO") if group.rank and source.is_stored else found

    def fail(rt):
        for weights in ([1, 9], [9, 1]):
            with pytest.raises(StorageError, match="EIO"):
                rt.rebalance(shard_weights=weights)

    options = {"plan": zr.Plan.zero(3, parameter="nvme"), "scratch": tmp_path}
    expected = run_threads(2, lambda group: digests(group, between=lambda rt: None, **options))
    monkeypatch.setattr(recut, "move", fail_behind)
    assert run_threads(2, lambda group: digests(group, between=fail, **options)) == expected


class Watched:
    """A group that keeps what it is given to exchange."""

    def __init__(self, group):
        self._group, self.rank, self.size, self.arrays = group, group.rank, group.size, []

    def all_to_all(self, source, *, out, **how):
        self.arrays += [source, out]
        return self._group.all_to_all(source, out=out, **how)


@pytest.mark.parametrize("weights", [([1, 20, 1], [8, 1, 8]), ([8, 1, 8], [1, 20, 1]), ([1, 0, 2], [0, 3, 0])])
def test_values_in_memory_move_without_arrays_in_between(weights):
    """The room that is asked for before a move has none for such arrays."""
    before, after = (Partition.build(600, 3, weights=one) for one in weights)

    def body(group):
        mine, own = before.of(group.rank), after.of(group.rank)
        old, new = np.arange(mine.first, mine.stop), np.full(own.numel, -1)
        watched = Watched(group)
        moving._move_in_memory(watched, old, new, before, after, name="move")
        np.testing.assert_array_equal(new, np.arange(own.first, own.stop))
        assert all(not one.size or np.shares_memory(one, old) or np.shares_memory(one, new) for one in watched.arrays)
        return len(watched.arrays)

    assert min(run_threads(3, body)) > 0


def test_room_is_asked_for_what_arrives_alone():
    def body(group):
        with opened(group) as rt:
            moved = rt.rebalance(shard_weights=[1, 4]).nbytes
            rt.rebalance(shard_weights=[1, 1])
            group.barrier().wait()
            with seams.inside(expect_room, available_nbytes=lambda: moved - 1) if rt.rank == 0 else nullcontext():
                group.barrier().wait()
                with pytest.raises(PlanError, match="Nothing was moved"):
                    rt.rebalance(shard_weights=[1, 4])
                group.barrier().wait()
            group.barrier().wait()
            with seams.inside(expect_room, available_nbytes=lambda: moved) if rt.rank == 0 else nullcontext():
                group.barrier().wait()
                assert rt.rebalance(shard_weights=[1, 4]).nbytes == moved
                group.barrier().wait()

    run_threads(2, body)
