"""State that rests on a disk: cut into chunks, refused where there is no room, and never used after a torn update."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerort as zr
from zerort.checkpoint import verify
from zerort.device import Ticket
from zerort.engine.column import Column, cut_chunks
from zerort.engine.ledger import Ledger
from zerort.engine.offload_options import OFFLOAD_ENVIRONMENT, scratch_directories
from zerort.engine.section_tiers import SectionTiers
from zerort.engine.tiers import Tiers
from zerort.errors import CallError, PlanError, RankFailedError, StorageError
from zerort.offload import MemoryStore, Part
from zerort.offload.crew import Operation
from zerort.offload.faults import injected
from zerort.testing.threads import run_threads

NVME, DEVICE = zr.Tier.NVME, zr.Tier.DEVICE
STATE = zr.Plan.zero(3, state=NVME)
EVERYTHING = zr.Plan.zero(3, parameter=NVME, gradient=NVME, state=NVME)
SMALL = zr.OffloadOptions(chunk_nbytes=8192, threads=2, retries=0)
NUMEL = 9000


# -- values and options ------------------------------------------------------------------------------------------------


@given(numel=st.integers(0, 100_000), most=st.integers(1, 50_000))
def test_chunks_tile_the_range(numel, most):
    cuts = cut_chunks(numel, most=most)
    assert cuts[0] == 0
    assert cuts[-1] == numel
    assert all(0 < last - first <= max(most, 2048) for first, last in itertools.pairwise(cuts) if numel)
    assert all(first % 2048 == 0 for first in cuts[:-1])


def test_a_column_reads_and_writes_any_range_wherever_it_rests(tmp_path):
    def body(group):
        tiers = Tiers(group, scratch=tmp_path, options=SMALL, ledger=Ledger())
        tiers.prepare(4 * NUMEL, what="a column")
        cuts = cut_chunks(NUMEL, most=2048)
        column = Column("values", cuts, np.zeros(cuts[2], np.float32), resident=2, tiers=tiers)
        column.create()
        assert column.resting_nbytes == tiers.resting_nbytes == 4 * (NUMEL - cuts[2])
        expected = np.zeros(NUMEL, np.float32)
        generator = np.random.default_rng(0)
        for _ in range(40):
            first, last = sorted(generator.integers(0, NUMEL + 1, 2))
            column.write(first, generator.standard_normal(last - first).astype(np.float32)).wait()
            generator = np.random.default_rng(last)
            expected[first:last] = column.read(first, np.empty(last - first, np.float32)).wait()
            np.testing.assert_array_equal(column.read(0, np.empty(NUMEL, np.float32)).wait(), expected)
        assert [column.is_resting(at) for at in range(len(cuts) - 1)] == [False, False, *[True] * (len(cuts) - 3)]
        column.delete()
        column.delete()
        assert tiers.resting_nbytes == 0
        tiers.close()

    run_threads(1, body)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("stage", "tiers", "text"),
    [
        (2, {"parameter": NVME}, "Expected the parameter on NVME to be SHARDED, got REPLICATED. .*Plan.zero"),
        (1, {"gradient": NVME}, "Expected the gradient on NVME to be SHARDED, got PARTIAL"),
        (0, {"state": NVME}, "Expected the state on NVME to be SHARDED, got REPLICATED"),
    ],
)
def test_plans_that_no_disk_can_serve_say_the_cure(stage, tiers, text):
    with pytest.raises(PlanError, match=text):
        zr.Plan.zero(stage, **tiers)


def test_a_section_takes_the_plans_tiers_and_proves_its_own():
    plan = zr.Plan.zero(3, state=NVME)
    assert SectionTiers.of(plan) == SectionTiers(parameter=DEVICE, gradient=DEVICE, state=NVME)
    assert SectionTiers.of(plan).streams
    with pytest.raises(CallError, match="state_resident_nbytes"):
        SectionTiers(parameter=DEVICE, gradient=DEVICE, state=NVME, state_resident_nbytes=-1)
    with pytest.raises(CallError, match="Expected a Tier for the state"):
        SectionTiers(parameter=DEVICE, gradient=DEVICE, state="nvme")


GOOD = {
    "ZERORT_OFFLOAD_CHUNK_BYTES": ("1MiB", 1024**2),
    "ZERORT_OFFLOAD_DEPTH": ("auto", "auto"),
    "ZERORT_OFFLOAD_CHECKSUM": ("0", False),
    "ZERORT_OFFLOAD_DIRECT": ("no", False),
    "ZERORT_OFFLOAD_THREADS": ("7", 7),
    "ZERORT_OFFLOAD_RETRIES": ("0", 0),
    "ZERORT_OFFLOAD_KEEP": ("1", True),
}


def test_the_environment_sets_every_option(monkeypatch):
    assert set(GOOD) == set(OFFLOAD_ENVIRONMENT)
    fields = {field.name for field in dataclasses.fields(zr.OffloadOptions)}
    assert {variable.field for variable in OFFLOAD_ENVIRONMENT.values()} == fields
    for name, (text, _) in GOOD.items():
        monkeypatch.setenv(name, text)
    options = zr.OffloadOptions.from_environment()
    for name, (_, value) in GOOD.items():
        assert getattr(options, OFFLOAD_ENVIRONMENT[name].field) == value
    monkeypatch.setenv("ZERORT_OFFLOAD_DEPTH", "0")
    with pytest.raises(CallError, match="Expected ZERORT_OFFLOAD_DEPTH to be a count above 0, or auto, got '0'"):
        zr.OffloadOptions.from_environment()


@pytest.mark.parametrize(
    "wrong", [{"chunk_nbytes": 1}, {"depth": 0}, {"depth": "deep"}, {"threads": 0}, {"retries": -1}, {"keep": 1}]
)
def test_options_prove_themselves(wrong):
    with pytest.raises(CallError, match=f"Expected {next(iter(wrong))}"):
        zr.OffloadOptions(**wrong)


def test_scratch_is_what_is_given_then_the_environments(monkeypatch, tmp_path):
    monkeypatch.setenv("ZERORT_SCRATCH", f"{tmp_path}/a:{tmp_path}/b")
    assert scratch_directories(None) == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert scratch_directories(tmp_path) == (str(tmp_path),)


class FullMemory(MemoryStore):
    """A store of which every write fails with what is no `StorageError`; who waits for it is told."""

    def write(self, name, source, *, offset=0):
        def fail(pieces):
            raise MemoryError("none left")

        operation = Operation(fail, pieces=1, begin=offset, end=offset + source.nbytes, writes=True)
        operation.start(1)
        operation.run()
        return Ticket(operation, result=source)


def test_whatever_a_write_raised_is_told_as_a_storage_error(tmp_path):
    def body(group):
        tiers = Tiers(group, scratch=tmp_path, options=SMALL, ledger=Ledger())
        store = FullMemory()
        store.create("v", 4096)
        with pytest.raises(StorageError, match=r"got MemoryError: none left \(rank 0\)\. Go back to a checkpoint"):
            tiers.run([[Part(store=store, name="v", numel=1024)]], lambda number, array: None)
        assert isinstance(tiers.settle().__cause__, MemoryError)
        tiers.mend()
        assert tiers.failure() is None
        tiers.close()
        store.close()

    run_threads(1, body)


# -- before anything is put there --------------------------------------------------------------------------------------


def test_too_little_room_is_refused_with_the_numbers_on_every_rank(tmp_path):
    def body(group):
        tiers = Tiers(group, scratch=tmp_path, options=SMALL, ledger=Ledger())
        with pytest.raises(StorageError, match=r"Expected 2048PiB .* for unit 'a' .* free: all ranks of"):
            tiers.prepare(2**60, what="unit 'a'")
        tiers.close()

    run_threads(2, body)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_is_refused_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")

    def body(group):
        scratch = tmp_path / ("file" if group.rank == 1 else "directory")
        tiers = Tiers(group, scratch=scratch, options=SMALL, ledger=Ledger())
        with pytest.raises(StorageError, match=r"file/?.*rank 1|Expected to read and write .*file"):
            tiers.prepare(100, what="unit 'a'")
        tiers.close()

    run_threads(2, body)


def test_memory_in_a_disks_place_is_said_loudly(tmp_path):
    def body(group):
        tiers = Tiers(group, scratch="/dev/shm/zerort-test-tiers", options=SMALL, ledger=Ledger())
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            tiers.prepare(4096, what="unit 'a'")
        assert any("which is memory (tmpfs)" in str(one.message) for one in found)
        tiers.close()

    try:
        run_threads(1, body)
        assert os.listdir("/dev/shm/zerort-test-tiers") == []
    finally:
        os.rmdir("/dev/shm/zerort-test-tiers")


# -- a runtime ---------------------------------------------------------------------------------------------------------


def open_runtime(group, scratch, plan=STATE, **options):
    return zr.open(plan=plan, group=group, optimizer=zr.AdamW(lr=0.1), scratch=scratch, offload=SMALL, **options)


def values(at):
    return {"w": np.random.default_rng(at).standard_normal(NUMEL).astype(np.float32)}


def steps(rt, numbers):
    for number in numbers:
        for at, unit in enumerate(rt.units.values()):
            unit.reduce({"w": np.random.default_rng((number, at, rt.rank)).standard_normal(NUMEL).astype(np.float32)})
        report = rt.step()
    return report


def weights(rt):
    found = {}
    for unit in rt.units.values():
        with unit.gathered() as p:
            found[unit.name] = np.array(p["w"])
    return found


def test_the_first_state_of_a_section_may_stay_in_memory(tmp_path):
    def body(group, resident):
        with open_runtime(group, tmp_path) as rt:
            tiers = SectionTiers(parameter=DEVICE, gradient=DEVICE, state=NVME, state_resident_nbytes=resident)
            rt.setup = dataclasses.replace(rt.setup, tiers_of=lambda name: tiers)
            rt.register("a", values(0))
            report = steps(rt, range(3))
            return weights(rt)["a"], rt.memory(), report

    total = 2 * 4 * 9024  # padded to 64
    found = {resident: run_threads(1, lambda g, r=resident: body(g, r))[0] for resident in (0, 40_000, total)}
    for resident, (array, memory, report) in found.items():
        np.testing.assert_array_equal(array, found[0][0])
        assert memory.state + memory.nvme == total
        assert memory.state <= resident
        assert sum(report.bytes_tiered.values()) == 2 * memory.nvme
    assert found[total][1].nvme == 0
    assert 0 < found[40_000][1].state < total


def test_whole_tensor_optimizers_keep_their_state_in_memory_and_say_so(tmp_path):
    def body(group):
        plan = zr.Plan.zero(3, state=NVME)
        with zr.open(plan=plan, group=group, optimizer=zr.Adafactor(lr=0.1), scratch=tmp_path) as rt:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                rt.register("a", values(0))
            assert ["looks at whole tensors" in str(one.message) for one in found] == [True] * (group.rank == 0)
            steps(rt, range(2))
            assert rt.memory().nvme == 0 < rt.memory().state

    run_threads(1, body)


def test_a_unit_that_finds_no_room_is_not_registered_and_can_be_later(tmp_path):
    def body(group):
        with open_runtime(group, tmp_path) as rt:
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
        with open_runtime(group, tmp_path, zr.Plan.zero(3, parameter=NVME)) as rt:
            lender = rt.register("lender", values(0))
            with faults(group, "enospc@1:op=write:file=borrower"), pytest.raises(StorageError, match="borrower"):
                rt.register("borrower", {"b": np.ones(7, np.float32)}, ties={"w": (lender, "w")})
            assert steps(rt, [0]).updated

    run_threads(2, body)


def test_a_lenders_gradient_stays_in_memory_and_says_so(tmp_path):
    units = {"lender": {"w": zr.TensorSpec((NUMEL,))}, "borrower": {"b": zr.TensorSpec((7,))}}

    def body(group, plan, warned):
        with open_runtime(group, tmp_path, plan) as rt:
            lender = rt.register("lender", values(0))
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                borrower = rt.register("borrower", {"b": np.ones(7, np.float32)}, ties={"w": (lender, "w")})
            assert ["The gradient of 'lender float32' stays in memory" in str(one.message) for one in found] == warned
            assert not [
                name for _, _, names in os.walk(tmp_path) for name in names if "lender%20float32%2Fgrad" in name
            ]
            for _ in range(2):
                lender.reduce(values(1))
                borrower.reduce({"w": values(2)["w"], "b": np.ones(7, np.float32)})
                assert rt.step().updated
            told = zr.forecast(units, plan=plan, optimizer=rt.optimizer, size=1, lenders=["lender"], offload=SMALL)
            memory = rt.memory()
            for part in ("parameter", "gradient", "state", "nvme"):
                assert getattr(memory, part) == getattr(told, part), part
            with lender.gathered() as p:
                return np.array(p["w"])

    plans = {zr.Plan.zero(3): [], zr.Plan.zero(3, gradient=NVME): [True], EVERYTHING: [True]}
    expected, *others = (run_threads(1, lambda g, p=plan: body(g, p, plans[p]))[0] for plan in plans)
    for found in others:
        np.testing.assert_array_equal(found, expected)


@contextlib.contextmanager
def faults(group, text):
    """Faults of the whole process, put in place by rank 0 while the others wait."""
    with contextlib.ExitStack() as stack:
        if group.rank == 0:
            stack.enter_context(injected(text))
        group.barrier().wait()
        yield
        group.barrier().wait()
    group.barrier().wait()


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
        with open_runtime(group, scratch) as rt:
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

    def undisturbed(group):
        with zr.open(plan=zr.Plan.zero(3), group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            for at in range(2):
                rt.register(f"unit{at}", values(at))
            steps(rt, range(5))
            return weights(rt)

    found, expected = run_threads(2, body), run_threads(2, undisturbed)
    for name, value in expected[0].items():
        np.testing.assert_array_equal(found[0][name], value)
    assert verify(path) == []
    assert os.listdir(scratch) == []


def test_a_write_that_fails_after_the_next_step_began_ends_that_one_on_all_ranks(tmp_path):
    """With one chunk a step needs no slot of the last one: its reads alone wait for the write."""
    late = "file=-r1-:op=write"

    def body(group):
        with open_runtime(group, tmp_path / "scratch") as rt:
            unit = rt.register("a", {"w": np.zeros(100, np.float32)})

            def step():
                unit.reduce({"w": np.ones(100, np.float32)})
                return rt.step()

            step()
            rt.save(tmp_path / "checkpoint")
            step()
            rt.tiers.settle()
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
    fixed = {"deterministic": True, "virtual_shards": 2}  # then every report has a digest

    def body(group):
        with open_runtime(group, tmp_path, zr.Plan.zero(3, parameter=NVME), **fixed) as rt:
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
        with open_runtime(group, tmp_path / "scratch") as rt:
            rt.register("unit0", values(0))
            steps(rt, range(2))
            rt.save(tmp_path / "checkpoint")
            with faults(group, "enospc@3:op=write:file=-r1-"), contextlib.suppress(StorageError):
                steps(rt, [2])
                rt.tiers.settle()  # the write may have failed after the step
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
        "groups": [zr.ParameterGroup(f"{one}.*", momentum=momentum[one], fails=one == failing) for one in momentum],
    }

    def body(group):
        with zr.open(plan=STATE, group=group, scratch=tmp_path / "scratch", offload=SMALL, **settings) as rt:
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
        with open_runtime(group, tmp_path, EVERYTHING) as rt:
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
        with open_runtime(group, tmp_path, EVERYTHING) as rt:
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

    def undisturbed(group):
        with zr.open(plan=zr.Plan.zero(3), group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            for at in range(2):
                rt.register(f"unit{at}", values(at))
            steps(rt, range(3))
            return weights(rt)

    found, expected = run_threads(2, body), run_threads(2, undisturbed)
    for name, value in expected[0].items():
        np.testing.assert_array_equal(found[0][name], value)


def test_gradients_that_could_not_be_put_away_are_forgotten_with_their_step(tmp_path):
    def body(group):
        with open_runtime(group, tmp_path, EVERYTHING) as rt:
            units = [rt.register(f"unit{at}", values(at)) for at in range(2)]
            fault = "enospc@1:op=write:times=all:file=unit1%20float32%2Fgradient"
            with faults(group, fault), pytest.raises(StorageError, match=r"gradient.*No space left"):
                steps(rt, [0])
            units[0].reduce(values(2))  # the other has none
            assert rt.step().updated

    run_threads(2, body)


def test_frozen_parameters_are_read_and_never_written_back(tmp_path):
    def body(group):
        with open_runtime(group, tmp_path, zr.Plan.zero(3, parameter=NVME)) as rt:
            rt.register("cold", values(0), frozen=True)
            rt.register("warm", values(1))
            for _ in range(2):
                for unit in rt.units.values():
                    with unit.gathered() as p:
                        if unit.name == "cold":
                            np.testing.assert_array_equal(p["w"], values(0)["w"])
                rt.units["warm"].reduce({"w": np.ones(NUMEL, np.float32)})
                report = rt.step()
            nbytes = 4 * 9024
            assert report.bytes_tiered == {"nvme read": 3 * nbytes, "nvme write": nbytes}
            assert rt.memory().nvme == 2 * nbytes

    run_threads(1, body)


@pytest.mark.parametrize("options", [{"micro_steps": 2}, {"deterministic": True, "virtual_shards": 2}])
def test_gradients_that_are_summed_more_than_once_stay_in_memory(tmp_path, options):
    def body(group):
        with pytest.raises(PlanError, match=r"with gradients on NVME, got another.*gradient=Tier.HOST"):
            open_runtime(group, tmp_path, EVERYTHING, **options)

    run_threads(2, body)


def test_new_values_reach_what_rests(tmp_path):
    def body(group):
        with open_runtime(group, tmp_path, EVERYTHING) as rt:
            unit = rt.register("a", {"w": np.zeros(NUMEL, "bfloat16"), "b": np.ones(7, "bfloat16")})
            unit.assign({"w": np.full(NUMEL, 3, "bfloat16")})
            with unit.gathered() as p:
                assert (p["w"] == 3).all()
                assert (p["b"] == 1).all()
            unit.reduce({"b": np.ones(7, "bfloat16")})
            rt.step()
            with unit.gathered() as p:
                assert (p["w"] == 3).all()  # its master weights were told
                assert (p["b"] != 1).all()

    run_threads(2, body)


def test_an_exception_in_the_users_loop_leaves_no_files(tmp_path):
    def body(group):
        with open_runtime(group, tmp_path) as rt:
            rt.register("a", values(0))
            steps(rt, range(2))
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        run_threads(1, body)
    assert os.listdir(tmp_path) == []


def test_files_are_kept_for_who_asks(tmp_path):
    def body(group):
        plan = zr.Plan.zero(3, state=NVME)
        options = dataclasses.replace(SMALL, keep=True)
        with zr.open(plan=plan, group=group, scratch=tmp_path, offload=options) as rt:
            rt.register("a", values(0))

    run_threads(1, body)
    assert [name[:12] for name in os.listdir(tmp_path)] == ["zerort-kept-"]


def test_several_directories_share_the_values(tmp_path):
    def body(group):
        with open_runtime(group, [tmp_path / "a", tmp_path / "b"]) as rt:
            rt.register("unit0", values(0))
            steps(rt, range(3))
            return weights(rt)

    def in_memory(group):
        with zr.open(plan=zr.Plan.zero(3), group=group, optimizer=zr.AdamW(lr=0.1)) as rt:
            rt.register("unit0", values(0))
            steps(rt, range(3))
            return weights(rt)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # on a busy disk one of two directories may look too slow
        (found,) = run_threads(1, body)
    (expected,) = run_threads(1, in_memory)
    np.testing.assert_array_equal(found["unit0"], expected["unit0"])
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []
