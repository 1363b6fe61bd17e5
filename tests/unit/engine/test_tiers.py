"""State that rests on a disk: cut into chunks, refused where there is no room, the same bits wherever it rests."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
import warnings

import numpy as np
import pytest
import seams
from hypothesis import given
from hypothesis import strategies as st
from runs import EVERYTHING, NUMEL, NVME, SMALL, open_offloaded, open_session, steps, values, weights

import zerort as zr
from zerort.config.environment import OFFLOAD_ENVIRONMENT
from zerort.config.offload import scratch_directories
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.residence.chunked_array import ChunkedArray, cut_chunks
from zerort.errors import CallError, PlanError, StorageError
from zerort.storage.files.owners import this_owner
from zerort.storage.opening import expect_room
from zerort.testing.threads import run_threads

DEVICE = zr.Tier.DEVICE


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
        storage = open_session(group, tmp_path)
        storage.prepare(4 * NUMEL, what="a column")
        cuts = cut_chunks(NUMEL, most=2048)
        column = ChunkedArray("values", cuts, np.zeros(cuts[2], np.float32), resident=2, storage=storage)
        column.create()
        assert column.offloaded_nbytes == storage.nbytes == 4 * (NUMEL - cuts[2])
        expected = np.zeros(NUMEL, np.float32)
        generator = np.random.default_rng(0)
        for _ in range(40):
            first, last = sorted(generator.integers(0, NUMEL + 1, 2))
            column.write(first, generator.standard_normal(last - first).astype(np.float32)).wait()
            generator = np.random.default_rng(last)
            expected[first:last] = column.read(first, np.empty(last - first, np.float32)).wait()
            np.testing.assert_array_equal(column.read(0, np.empty(NUMEL, np.float32)).wait(), expected)
        assert [column.is_chunk_offloaded(at) for at in range(len(cuts) - 1)] == [
            False,
            False,
            *[True] * (len(cuts) - 3),
        ]
        column.delete()
        column.delete()
        assert storage.nbytes == 0
        storage.close()

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
    assert SectionResidence.of(plan) == SectionResidence(parameter=DEVICE, gradient=DEVICE, state=NVME)
    assert SectionResidence.of(plan).streams
    with pytest.raises(CallError, match="state_resident_nbytes"):
        SectionResidence(parameter=DEVICE, gradient=DEVICE, state=NVME, state_resident_nbytes=-1)
    with pytest.raises(CallError, match="Expected a Tier for the state"):
        SectionResidence(parameter=DEVICE, gradient=DEVICE, state="nvme")


GOOD = {
    "ZERORT_OFFLOAD_CHUNK_BYTES": ("1MiB", 1024**2),
    "ZERORT_OFFLOAD_DEPTH": ("5", 5),
    "ZERORT_OFFLOAD_CHECKSUM": ("0", False),
    "ZERORT_OFFLOAD_DIRECT": ("no", False),
    "ZERORT_OFFLOAD_THREADS": ("7", 7),
    "ZERORT_OFFLOAD_RETRIES": ("0", 0),
    "ZERORT_OFFLOAD_UPDATE_ON": ("host", "host"),
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
    with pytest.raises(CallError, match="Expected ZERORT_OFFLOAD_DEPTH to be a count above 0, got '0'"):
        zr.OffloadOptions.from_environment()


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_nbytes": 1},
        {"depth": 0},
        {"depth": "deep"},
        {"threads": 0},
        {"retries": -1},
        {"depth": "auto"},
        {"update_on": "gpu"},
        {"update_on": "auto"},
    ],
)
def test_options_prove_themselves(wrong):
    with pytest.raises(CallError, match=f"Expected {next(iter(wrong))}"):
        zr.OffloadOptions(**wrong)


def test_scratch_is_what_is_given_then_the_environments(monkeypatch, tmp_path):
    monkeypatch.setenv("ZERORT_SCRATCH", f"{tmp_path}/a:{tmp_path}/b")
    assert scratch_directories(None) == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert scratch_directories(tmp_path) == (str(tmp_path),)


# -- before anything is put there --------------------------------------------------------------------------------------


def test_too_little_room_is_refused_with_the_numbers_on_every_rank(tmp_path):
    def body(group):
        storage = open_session(group, tmp_path)
        with pytest.raises(StorageError, match=r"Expected 2048PiB .* for unit 'a' .* free: all ranks of"):
            storage.prepare(2**60, what="unit 'a'")
        storage.close()

    run_threads(2, body)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_left_is_deleted_before_room_is_asked_for(tmp_path):
    host, _, pid, start = this_owner()
    left = tmp_path / f"zerort-offload-{host}-00000000-{pid}-{start}-r0-0123abcd"  # of before the machine was booted

    def body(group):
        storage = open_session(group, tmp_path)
        storage.prepare(500, what="unit 'a'")  # on each of two ranks
        storage.close()

    left.mkdir()
    (left / "value.chunk").write_bytes(bytes(1))
    with seams.inside(expect_room, free_nbytes=lambda path: 1000 - left.exists()):
        run_threads(2, body)
    assert os.listdir(tmp_path) == []


def test_directories_on_one_disk_share_its_room(tmp_path):
    here = [str(tmp_path / "a"), str(tmp_path / "b")]
    with seams.free(100):
        expect_room([*here, "/dev/shm/zerort-test"], 200, what="unit 'a'")
        with pytest.raises(StorageError, match=r"for unit 'a' at .*/a .*/b"):
            expect_room(here, 101, what="unit 'a'")


def test_a_directory_that_cannot_be_is_refused_on_every_rank(tmp_path):
    """The other rank, whose directory will do, leaves nothing there."""
    (tmp_path / "file").write_text("")
    (tmp_path / "directory").mkdir()

    def body(group):
        scratch = tmp_path / ("file" if group.rank == 1 else "directory")
        storage = open_session(group, scratch)
        with pytest.raises(StorageError, match=r"file/?.*rank 1|Expected to read and write .*file"):
            storage.prepare(100, what="unit 'a'")
        storage.close()

    run_threads(2, body)
    assert os.listdir(tmp_path / "directory") == []


@pytest.fixture
def in_memory():
    """A directory of its own in /dev/shm, where that is memory."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no mount of its own here")
    with tempfile.TemporaryDirectory(prefix="zerort-test-", dir="/dev/shm") as directory:
        yield directory


def test_memory_in_a_disks_place_is_said_loudly(in_memory):
    def body(group):
        storage = open_session(group, in_memory)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            storage.prepare(4096, what="unit 'a'")
        assert any("which is memory (tmpfs)" in str(one.message) for one in found)
        storage.close()

    run_threads(1, body)
    assert os.listdir(in_memory) == []


# -- a runtime ---------------------------------------------------------------------------------------------------------


def test_scratch_that_is_not_there_is_refused_on_every_rank_with_the_disk_it_would_be_on(in_memory):
    """The disk is not mounted, say: what it should hold would fill another one."""
    missing = f"{in_memory}/not-mounted/run"

    def body(group):
        with pytest.raises(StorageError, match=r"got none: .* would be on /dev/shm \(tmpfs on .*create_scratch=True"):
            zr.open(group=group, scratch=missing)
        with pytest.raises(StorageError, match=r"for last_step=.* would be on /dev/shm \(tmpfs on .* mkdir -p"):
            zr.open(group=group, last_step=f"{missing}/last")
        group.barrier().wait()

    run_threads(2, body)
    assert not os.path.exists(os.path.dirname(missing))


def test_scratch_of_the_environment_that_is_not_there_is_refused_when_something_goes_there(tmp_path, monkeypatch):
    monkeypatch.setenv("ZERORT_SCRATCH", str(tmp_path / "gone"))

    def body(group):
        with zr.open(plan=zr.Plan.zero(3, state=zr.Tier.NVME), group=group, offload=SMALL) as rt:
            with pytest.raises(StorageError, match="got none: it is not there"):
                rt.register("unit0", values(0))
            with zr.open(group=group) as in_memory:  # which puts nothing there
                in_memory.register("unit0", values(0))

    run_threads(2, body)
    assert os.listdir(tmp_path) == []


def test_scratch_that_is_asked_for_is_made(tmp_path, monkeypatch):
    plan = zr.Plan.zero(3, state=zr.Tier.NVME)

    def body(group, scratch):
        with zr.open(plan=plan, group=group, scratch=scratch, create_scratch=True, offload=SMALL) as rt:
            rt.register("unit0", values(0))
            steps(rt, range(1))
            assert rt.rank != 0 or rt.context.storage.disks[0].mount.point in str(rt.context.storage.disks[0])

    run_threads(2, lambda group: body(group, tmp_path / "new" / "one"))
    monkeypatch.setenv("ZERORT_SCRATCH", str(tmp_path / "environment"))
    run_threads(2, lambda group: body(group, None))
    assert os.listdir(tmp_path / "new" / "one") == os.listdir(tmp_path / "environment") == []


def test_the_first_state_of_a_section_may_stay_in_memory(tmp_path):
    def body(group, resident):
        with open_offloaded(group, tmp_path) as rt:
            tiers = SectionResidence(parameter=DEVICE, gradient=DEVICE, state=NVME, state_resident_nbytes=resident)
            rt.context = dataclasses.replace(rt.context, tiers_of=lambda name: tiers)
            rt.register("a", values(0))
            report = steps(rt, range(3))
            return weights(rt)["a.w"], rt.memory(), report

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


@pytest.mark.parametrize("first", ["owner", "borrower"])
def test_gradients_of_tied_units_are_added_where_they_rest(tmp_path, first):
    """In whatever order they come; at rest they take what they take without ties."""
    units = {"owner": {"w": zr.TensorSpec((NUMEL,))}, "borrower": {"b": zr.TensorSpec((7,))}}
    settings = {"size": 1, "offload": SMALL}

    def body(group, plan):
        with open_offloaded(group, tmp_path, plan) as rt:
            owner = rt.register("owner", values(0))
            borrower = rt.register("borrower", {"b": np.ones(7, np.float32)}, ties={"w": (owner, "w")})
            norms = []
            for _ in range(2):
                given = {"owner": values(1), "borrower": {"w": values(2)["w"], "b": np.ones(7, np.float32)}}
                for unit in (owner, borrower) if first == "owner" else (borrower, owner):
                    unit.reduce(given[unit.name])
                report = rt.step()
                norms.append(report.grad_norm)
            ties = {"borrower": {"w": ("owner", "w")}}
            told = zr.forecast(units, plan=plan, optimizer=rt.context.optimizer, ties=ties, **settings)
            memory = rt.memory()
            for part in ("parameter", "gradient", "state", "buckets", "nvme"):
                assert getattr(memory, part) == getattr(told, part), part
            untied = zr.forecast(units, plan=plan, optimizer=rt.context.optimizer, **settings)
            assert (memory.gradient, memory.nvme) == (untied.gradient, untied.nvme)
            with owner.gathered() as p:
                return np.array(p["w"]), norms

    plans = (zr.Plan.zero(3), zr.Plan.zero(3, gradient=NVME), EVERYTHING)
    (expected, norms), *others = (run_threads(1, lambda g, p=plan: body(g, p))[0] for plan in plans)
    for found, others_norms in others:
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(others_norms, norms, rtol=1e-14)


def test_frozen_parameters_are_read_and_never_written_back(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path, zr.Plan.zero(3, parameter=NVME)) as rt:
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


@pytest.mark.parametrize("options", [{"micro_steps": 2}, {"virtual_shards": 2}])
def test_gradients_that_are_summed_more_than_once_stay_in_memory(tmp_path, options):
    def body(group):
        with pytest.raises(PlanError, match=r"gradients on NVME to be shards, got whole .*gradient=Tier.HOST"):
            open_offloaded(group, tmp_path, EVERYTHING, accumulate="local", **options)

    run_threads(2, body)


def test_new_values_reach_what_rests(tmp_path):
    def body(group):
        with open_offloaded(group, tmp_path, EVERYTHING) as rt:
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


def test_several_directories_share_the_values(tmp_path):
    def body(group):
        with open_offloaded(group, [tmp_path / "a", tmp_path / "b"]) as rt:
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
    np.testing.assert_array_equal(found["unit0.w"], expected["unit0.w"])
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []
