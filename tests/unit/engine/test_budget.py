"""What rests where under a budget: never more than there is, nothing colder with more, whole what fits whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zerort.config import Plan, Tier
from zerort.engine.residence.choose import SectionResidence
from zerort.engine.sizing.budget import Capacity, decide
from zerort.engine.sizing.section_size import PARTS, SectionSize
from zerort.engine.sizing.working import WorkingMemory
from zerort.errors import PlanError

COLUMNS = {"parameter": (2,), "gradient": (2,), "state": (4, 4, 4)}
COLDNESS = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.NVME: 2}


def nbytes(most):
    return st.integers(0, most)


@st.composite
def tables(draw, unit):
    fixed = draw(nbytes(50_000))
    return SectionSize(
        unit=unit,
        parameter=draw(nbytes(200_000)),
        state=fixed + draw(nbytes(900_000)),
        fixed=fixed,
        numel=draw(st.integers(0, 9_000)),
        columns={"parameter": (draw(st.sampled_from([2, 4])),), "gradient": (0,), "state": (4, 4, 4)},
        row_width=draw(st.sampled_from([1, 70, 5_000])),
        movable=frozenset({"parameter", "state"}),
    )


@st.composite
def models(draw):
    sizes = []
    for unit in range(draw(st.integers(0, 5))):
        for _ in range(draw(st.integers(1, 2))):
            trained = draw(st.booleans())
            if draw(st.sampled_from([False, False, True])):
                sizes.append(draw(tables(str(unit))))
                continue
            sizes.append(
                SectionSize(
                    unit=str(unit),
                    parameter=draw(nbytes(200000)),
                    gradient=draw(nbytes(200000)) * trained,
                    state=draw(nbytes(900_000)) * trained,
                    whole=draw(nbytes(500000)),
                    bucket=draw(nbytes(500000)) * trained,
                    is_held=trained,
                    numel=draw(st.integers(0, 50)),
                    columns={"parameter": (2,), "gradient": (2,), "state": (4, 4, 4)}
                    if trained
                    else {"parameter": (4,)},
                    movable=frozenset(PARTS[draw(st.sampled_from([0, 0, 0, 1, 2, 3])) :]),
                )
            )
    return WorkingMemory(
        sizes=sizes,
        prefetch=draw(st.integers(0, 2)),
        buckets=draw(st.integers(1, 3)),
        one_memory=draw(st.booleans()),
        reach=draw(st.sampled_from([frozenset({Tier.DEVICE}), frozenset({Tier.DEVICE, Tier.HOST})])),
    )


capacities = st.builds(Capacity, nbytes(9_000_000), nbytes(3_000_000), nbytes(9_000_000))


WHOLE = SectionResidence(parameter=Tier.DEVICE, gradient=Tier.DEVICE, state=Tier.DEVICE)


def on_disk(size):
    return SectionResidence(**{part: Tier.NVME if part in size.movable else Tier.DEVICE for part in PARTS})


def used(working, tiers):
    """Return the bytes in each memory, working memory included; counted part by part."""
    found = dict.fromkeys(Tier, 0)
    for size, one in zip(working.sizes, tiers, strict=True):
        for part in PARTS:
            nbytes, tier = getattr(size, part), getattr(one, part)
            fixed = size.fixed * (part == "state")
            resident = fixed + (one.state_resident_nbytes if part == "state" and tier is not Tier.DEVICE else 0)
            assert 0 <= resident <= nbytes
            assert part in size.movable or tier is Tier.DEVICE
            found[Tier.DEVICE] += resident
            found[tier] += nbytes - resident
    found[Tier.DEVICE] += working.of(tiers).nbytes
    return found


def attempt(working, capacity):
    try:
        return decide(capacity, working=working)
    except PlanError:
        return None


@given(models(), capacities)
def test_no_memory_is_used_beyond_its_budget(working, capacity):
    tiers = attempt(working, capacity)
    if tiers is not None:
        found = used(working, tiers)
        assert found[Tier.DEVICE] <= capacity.device
        assert found[Tier.HOST] <= capacity.host
        assert found[Tier.NVME] <= capacity.nvme


@given(models(), capacities, capacities)
def test_more_of_any_memory_moves_nothing_down(working, capacity, more):
    before = attempt(working, capacity)
    assume(before is not None)
    after = attempt(working, Capacity(*map(sum, zip(capacity, more, strict=True))))
    assert after is not None
    for size, one, other in zip(working.sizes, before, after, strict=True):
        for part in PARTS:
            assert COLDNESS[getattr(other, part)] <= COLDNESS[getattr(one, part)]
        if other.state is not Tier.DEVICE:
            assert other.state_resident_nbytes >= one.state_resident_nbytes
        assert size.state or other.state is Tier.DEVICE


@given(models())
def test_what_fits_whole_stays_whole(working):
    at_rest = sum(getattr(size, part) for size in working.sizes for part in PARTS)
    enough = at_rest + working.of([WHOLE] * len(working.sizes)).nbytes
    for one in decide(Capacity(enough, 0, 0), working=working):
        assert (one.parameter, one.gradient, one.state) == (Tier.DEVICE,) * 3


@given(models())
def test_everything_that_can_goes_to_a_large_disk_beside_the_working_memory(working):
    least = used(working, [on_disk(size) for size in working.sizes])[Tier.DEVICE]
    assert attempt(working, Capacity(least, 0, 10**9)) is not None


@given(models(), capacities, st.data())
def test_what_is_settled_stays_and_counts(working, capacity, data):
    if Tier.HOST in working.reach:  # then it is the device's own memory, and there is no other
        capacity = capacity._replace(host=0)
    before = attempt(working, capacity)
    assume(before)
    chosen = data.draw(st.sets(st.integers(0, len(before) - 1)))
    settled = {at: replace(before[at], state_resident_nbytes=0) for at in chosen}
    try:
        after = decide(capacity, working=working, settled=settled)
    except PlanError:  # state that was partly in memory is all below it now: there may be no room for that
        assert any(before[at].state_resident_nbytes for at in chosen)
        return
    assert all(after[at] == settled[at] for at in chosen)
    found = used(working, after)
    assert found[Tier.DEVICE] <= capacity.device
    assert found[Tier.NVME] <= capacity.nvme


MIB = 1024**2
STREAM = 3 * 3 * 4096  # three slots for three arrays of state, a page each
MORE = 3 * 4096  # and for one array more


def block(unit, *, state=600 * MIB, whole=0):
    sizes = {"parameter": 100 * MIB, "gradient": 100 * MIB, "state": state, "whole": whole}
    return SectionSize(unit=unit, numel=50, columns=COLUMNS, **sizes)


def test_the_hottest_rests_highest_and_state_is_cut():
    working = WorkingMemory(sizes=[block("a"), block("b")])
    first, second = decide(Capacity(STREAM + 550 * MIB, 0, 10**10), working=working)
    assert first == replace(WHOLE, state=Tier.NVME, state_resident_nbytes=150 * MIB)
    assert second == replace(WHOLE, state=Tier.NVME)


def test_tables_by_rows_leave_memory_before_anything_else_and_what_is_kept_of_their_rows_stays():
    columns = {"parameter": (4,), "gradient": (0,), "state": (4, 4)}
    table = SectionSize(
        unit="embed",
        parameter=100 * MIB,
        state=250 * MIB,
        fixed=50 * MIB,
        numel=50,
        columns=columns,
        row_width=5,
        movable=frozenset({"parameter", "state"}),
    )
    working = WorkingMemory(sizes=[table, block("a")])
    pages = 4096 * 6  # of parameter and two moments, and copies of their rows
    with_all, without, least = (pages + mib * MIB for mib in (950, 850, 849))
    first, second = decide(Capacity(with_all, 0, 10**10), working=working)
    assert (first, second) == (replace(WHOLE, state=Tier.NVME, state_resident_nbytes=4096), WHOLE)
    first, second = decide(Capacity(without, 0, 10**10), working=working)
    assert (first.parameter, first.state, second) == (Tier.NVME, Tier.NVME, WHOLE)
    first, second = decide(Capacity(least + STREAM, 0, 10**10), working=working)
    assert (first.parameter, first.state, second.state) == (Tier.NVME, Tier.NVME, Tier.NVME)


def test_what_the_device_leaves_goes_to_the_host_first():
    sizes = [replace(block(name), gradient=MIB) for name in "ab"]
    working = WorkingMemory(sizes=sizes, reach=frozenset({Tier.DEVICE}))
    expected = (
        SectionResidence(parameter=Tier.DEVICE, gradient=Tier.HOST, state=Tier.HOST),
        SectionResidence(parameter=Tier.HOST, gradient=Tier.HOST, state=Tier.NVME),
    )
    beside = working.of(expected)
    assert (beside.buckets, beside.gathered) == (2 * MIB, 0)
    least = beside.nbytes + 100 * MIB
    assert decide(Capacity(least + MIB, 702 * MIB, 600 * MIB), working=working) == expected
    with pytest.raises(PlanError, match="600MiB too much"):
        decide(Capacity(least - 1, 702 * MIB, 600 * MIB), working=working)


def test_a_refusal_has_the_numbers_and_the_cure():
    working = WorkingMemory(sizes=[replace(block("a", whole=MIB), gradient=4 * MIB)])
    message = (
        r"^Expected at least 10\.06MiB of memory per rank, whatever is on the disk: gradient buckets 8MiB, gathered "
        r"units 2MiB, chunks on their way 60KiB, what stays in memory 0B; got 9MiB\. Allow more memory, cut the model"
    )
    with pytest.raises(PlanError, match=message):
        decide(Capacity(9 * MIB, 0, 10**10), working=working)
    message = (
        r"^Expected the model to fit into memory 250\.04MiB, nvme 500MiB per rank, got parameter 100MiB, gradient "
        r"100MiB, state 600MiB, of which 550MiB are left for nvme: 50MiB too much\. Allow more of either, or start "
    )
    with pytest.raises(PlanError, match=message):
        decide(Capacity(STREAM + 250 * MIB, 0, 500 * MIB), working=WorkingMemory(sizes=[block("a")]))


def test_what_cannot_leave_stays_on_the_device():
    sizes = [replace(block("a"), movable=frozenset({"state"})), replace(block("b"), gradient=MIB)]
    least = 200 * MIB + STREAM + 2 * MORE + 2 * MIB
    first, second = decide(Capacity(least, 0, 10**10), working=WorkingMemory(sizes=sizes))
    assert first == replace(WHOLE, state=Tier.NVME)
    assert second.parameter is second.state is Tier.NVME
    with pytest.raises(PlanError, match=r"Expected at least .* what stays in memory 200MiB"):
        decide(Capacity(least - 3 * MIB, 0, 10**10), working=WorkingMemory(sizes=sizes))


def test_without_a_gpu_device_and_host_are_one_memory():
    budget = Plan.fit(device="2GiB", host="8GiB", nvme="200GiB")
    assert Capacity.of(budget) == (10 << 30, 0, 200 << 30)
    assert Capacity.of(budget, has_gpu=True) == (2 << 30, 8 << 30, 200 << 30)
