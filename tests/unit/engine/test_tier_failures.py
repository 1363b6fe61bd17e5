"""Disks and kernels that fail under a runtime: told to all ranks before anything builds on it, mended by a load."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading

import numpy as np
import pytest
from runs import (
    EVERYTHING,
    NVME,
    SMALL,
    STATE,
    assert_as_in_memory,
    faults,
    open_offloaded,
    open_session,
    steps,
    values,
    weights,
)

import zerort as zr
from zerort.checkpoint import verify
from zerort.device import Ticket
from zerort.engine.residence.host_memory import HostMemory
from zerort.errors import RankFailedError, StorageError
from zerort.storage.stores.operation import Span, StoreOperation
from zerort.streaming import StoreTransfer
from zerort.streaming.update_stream import UpdateStream
from zerort.testing.memory_store import MemoryStore
from zerort.testing.threads import run_threads
from zerort.trace.ledger import Ledger


class FullMemory(MemoryStore):
    """A store of which every write fails with what is no `StorageError`; who waits for it is told."""

    def write(self, name, source, *, offset=0):
        def fail():
            raise MemoryError("none left")

        operation = StoreOperation(Span(name, offset, offset + source.nbytes, writes=True))
        operation.attempt(fail)
        operation.asked.set()
        return Ticket(operation, result=source)


def test_whatever_a_write_raised_is_told_as_a_storage_error(tmp_path):
    def body(group):
        storage = open_session(group, tmp_path)
        updates = UpdateStream(storage, ledger=Ledger(), host=HostMemory(group), rank=0)
        store = FullMemory()
        store.create("v", 4096)
        with pytest.raises(StorageError, match=r"got MemoryError: none left \(rank 0\)\. Go back to a checkpoint"):
            updates.run([[StoreTransfer(store=store, name="v", numel=1024)]], lambda number, array: None)
        assert isinstance(updates.wait_written().__cause__, MemoryError)
        updates.reset()
        assert updates.failure() is None
        updates.close()
        storage.close()
        store.close()

    run_threads(1, body)


def test_a_window_that_reads_may_still_come_to_is_not_lent_again(tmp_path):
    def body(group):
        updates = UpdateStream(open_session(group, tmp_path), ledger=Ledger(), host=HostMemory(group), rank=0)
        with updates.window(8192) as first:
            assert first.ctypes.data % 4096 == 0
        with updates.window(4096) as again:
            assert again.ctypes.data == first.ctypes.data
        assert updates.nbytes == 8192
        with contextlib.suppress(KeyboardInterrupt), updates.window(4096) as interrupted:
            raise KeyboardInterrupt
        assert updates.nbytes == 0
        with updates.window(4096) as other:
            assert other.ctypes.data != interrupted.ctypes.data
        updates.close()

    run_threads(1, body)


def test_a_unit_that_finds_no_room_is_not_registered_and_can_be_later(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path) as rt:
            group.barrier().wait()
            with faults(group, "enospc@2:op=reserve:file=-r1-"):
                with pytest.raises(StorageError, match=r"for 'a float32/exp_avg/.*on rank 1"):
                    rt.register("a", values(0))
                group.barrier().wait()
            assert not rt.units
            assert rt.memory().nvme == 0
            rt.register("a", values(0))
            steps(rt, range(2))

    run_threads(2, body)
    assert os.listdir(tmp_path) == []


def test_a_tied_unit_that_could_not_be_registered_leaves_its_lender_as_it_was(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path, zr.Plan.zero(3, parameter=NVME)) as rt:
            lender = rt.register("lender", values(0))
            with faults(group, "enospc@1:op=write:file=borrower"), pytest.raises(StorageError, match="borrower"):
                rt.register("borrower", {"b": np.ones(7, np.float32)}, ties={"w": (lender, "w")})
            assert steps(rt, [0]).updated

    run_threads(2, body)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("eio@3:op=write:times=all:file=-r1-", "at offset 0 on rank 1, got Input/output error"),
        ("eio@3:op=read:times=all:file=-r1-", "at offset 0 on rank 1, got Input/output error"),
        ("enospc@3:op=write:file=-r1-", "on rank 1, got .* free: No space left"),
    ],
)
def test_a_disk_that_fails_in_an_update_ends_it_on_all_ranks_and_a_checkpoint_mends_it(tmp_path, fault, text):
    scratch, path = tmp_path / "scratch", tmp_path / "checkpoint"

    def body(group):
        with open_offloaded(group, scratch) as rt:
            for at in range(2):
                rt.register(f"unit{at}", values(at))
            steps(rt, range(3))
            rt.save(path)
            with faults(group, fault), pytest.raises(StorageError, match=text):
                steps(rt, [3])
            for verb in (lambda: steps(rt, [4]), lambda: rt.save(path), weights):
                with pytest.raises(StorageError, match=r"got those of update 4, half done .*rt.load\(path\)"):
                    verb() if verb is not weights else weights(rt)
            rt.discard_gradients()
            assert rt.load(path).updates == 3
            steps(rt, [3, 4])
            return weights(rt)

    assert_as_in_memory(run_threads(2, body)[0], 5)
    assert verify(path) == []
    assert os.listdir(scratch) == []


def test_a_write_that_fails_after_the_next_step_began_ends_that_one_on_all_ranks(tmp_path):
    """With one chunk a step needs no slot of the last one: its reads alone wait for the write."""
    late = "file=-r1-:op=write"

    def body(group):
        with open_offloaded(group, tmp_path / "scratch") as rt:
            unit = rt.register("a", {"w": np.zeros(100, np.float32)})

            def step():
                unit.reduce({"w": np.ones(100, np.float32)})
                return rt.step()

            step()
            rt.save(tmp_path / "checkpoint")
            step()
            rt.context.update_stream.wait_written()
            with faults(group, f"delay@1:seconds=1:{late},enospc@1:{late}"):
                assert step().updated
                with pytest.raises(StorageError, match=r"on rank 1, got .*No space left"):
                    step()
            with pytest.raises(StorageError, match="No space left"):
                rt.save(tmp_path / "checkpoint")
            assert rt.load(tmp_path / "checkpoint").updates == 1

    run_threads(2, body)


def test_no_digest_is_told_of_what_could_not_be_written(tmp_path):
    late = "op=write:file=parameter"
    fixed = {"virtual_shards": 2}  # then every report has a digest

    def body(group):
        with open_offloaded(group, tmp_path, zr.Plan.zero(3, parameter=NVME), **fixed) as rt:
            unit = rt.register("a", {"w": np.zeros(100, np.float32)})
            unit.reduce({"w": np.ones(100, np.float32)})
            with (
                faults(group, f"delay@1:seconds=0.5:{late},enospc@1:{late}"),
                pytest.raises(StorageError, match="No space left"),
            ):
                rt.step()

    run_threads(2, body)


def test_parameters_alone_are_not_loaded_beside_torn_state(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path / "scratch") as rt:
            rt.register("unit0", values(0))
            steps(rt, range(2))
            rt.save(tmp_path / "checkpoint")
            with faults(group, "enospc@3:op=write:file=-r1-"), contextlib.suppress(StorageError):
                steps(rt, [2])
                rt.context.update_stream.wait_written()  # the write may have failed after the step
            with pytest.raises(StorageError, match=r"Expected whole optimizer state .*rt\.load\(path\); or open"):
                rt.load(tmp_path / "checkpoint", optimizer=False)
            rt.load(tmp_path / "checkpoint")
            rt.load(tmp_path / "checkpoint", optimizer=False)
            assert steps(rt, [2]).updated

    run_threads(2, body)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(zr.SGD):
    """Its kernel fails in the second update, on rank 1, if it is told to."""

    fails: bool = False

    def update_(self, param, grad, state, *, step, **settings):
        if self.fails and step == 2 and threading.current_thread().name == "rank 1":
            raise ArithmeticError("of a kernel")
        super().update_(param, grad, state, step=step, **settings)


@pytest.mark.parametrize("failing", ["in_memory", "streamed"])
def test_a_kernel_that_fails_on_one_rank_ends_the_update_on_all(tmp_path, failing):
    """Chunks of one unit stay in memory (no state), those of the other stream."""
    momentum = {"in_memory": 0.0, "streamed": 0.9}
    settings = {
        "optimizer": Failing(lr=0.1),
        "param_groups": [
            zr.ParameterGroup(f"{one}.*", momentum=momentum[one], fails=one == failing) for one in momentum
        ],
    }

    def body(group):
        with zr.open(plan=STATE, group=group, scratch=tmp_path, offload=SMALL, **settings) as rt:
            for at, name in enumerate(momentum):
                rt.register(name, values(at))
            steps(rt, [0])
            rt.save(tmp_path / "checkpoint")
            with pytest.raises(ArithmeticError if group.rank == 1 else RankFailedError, match="of a kernel"):
                steps(rt, [1])
            with pytest.raises(StorageError, match=r"got those of update 2, half done .*of a kernel"):
                steps(rt, [2])
            rt.discard_gradients()
            assert rt.load(tmp_path / "checkpoint").updates == 1

    run_threads(2, body)


def test_a_gather_that_a_disk_refuses_is_told_to_all_ranks_and_may_be_repeated(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path, EVERYTHING) as rt:
            for at in range(2):
                rt.register(f"unit{at}", values(at))
            steps(rt, range(2))
            before = weights(rt)
            for _ in range(3):  # the slot is given back each time
                with (
                    faults(group, "eio@1:op=read:times=all:file=-r1-"),
                    pytest.raises(StorageError, match=r"parameter.* on rank 1, got Input/output error"),
                ):
                    rt.units["unit1"].gather()
            for name, value in weights(rt).items():
                np.testing.assert_array_equal(value, before[name])
            steps(rt, range(2, 4))

    run_threads(2, body)
    assert os.listdir(tmp_path) == []


def test_gradients_that_cannot_be_put_away_stop_the_step_before_anything_changed(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path, EVERYTHING) as rt:
            for at in range(2):
                rt.register(f"unit{at}", values(at))
            steps(rt, range(2))
            before = weights(rt)
            fault = "enospc@1:op=write:times=all:file=gradient"
            with faults(group, fault), pytest.raises(StorageError, match=r"gradient.*No space left"):
                steps(rt, [2])
            for name, value in weights(rt).items():
                np.testing.assert_array_equal(value, before[name])
            assert steps(rt, [2]).update == 3
            return weights(rt)

    assert_as_in_memory(run_threads(2, body)[0], 3)


def test_gradients_that_could_not_be_put_away_are_forgotten_with_their_step(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path, EVERYTHING) as rt:
            units = [rt.register(f"unit{at}", values(at)) for at in range(2)]
            fault = "enospc@1:op=write:times=all:file=unit1%20float32%2Fgradient"
            with faults(group, fault), pytest.raises(StorageError, match=r"gradient.*No space left"):
                steps(rt, [0])
            units[0].reduce(values(2))  # the other has none
            assert rt.step().updated

    run_threads(2, body)


def test_an_exception_in_the_users_loop_leaves_no_files(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path) as rt:
            rt.register("a", values(0))
            steps(rt, range(2))
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        run_threads(1, body)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fails_under_a_tied_sum_of_a_fixed_tree_updates_nothing(tmp_path):
    def body(group):
        plan = zr.Plan.zero(3, gradient=zr.Tier.NVME)
        settings = {"group": group, "scratch": tmp_path, "virtual_shards": 2, "reduction": "sum"}
        with zr.open(plan, zr.SGD(lr=1.0), **settings) as rt:
            embed = rt.register("embed", {"table": np.zeros(5000, np.float32)})
            head = rt.register("head", {}, ties={"out": (embed, "table")})

            def step():
                for _ in rt.micro_batches:
                    embed.reduce({"table": np.full(5000, 1, np.float32)})
                    head.reduce({"out": np.full(5000, 2, np.float32)})
                return rt.step()

            (section,) = rt.units["embed"].sections
            add_sums = section._sink._add_sums

            def fail(*args, **options):
                raise StorageError("EIO on rank 1")

            if group.rank == 1:
                section._sink._add_sums = fail
            with pytest.raises(StorageError, match="EIO on rank 1"):
                step()
            assert rt.updates == 0
            section._sink._add_sums = add_sums
            step()
            with embed.gathered() as parameters:
                return np.unique(parameters["table"]).tolist()

    assert run_threads(2, body) == [[-6.0], [-6.0]]
