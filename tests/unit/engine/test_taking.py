"""`rt.take`: ranks share every batch of one order, and a run goes on where it was, on any number of ranks."""

import numpy as np
import pytest

import zerort as zr
from zerort.errors import CallError, CheckpointError, NonFiniteError
from zerort.testing import run_threads

ORDER = zr.data.Order(length=53, batch=10, seed=7)  # 6 batches, the last of 3


def opened(group, **options):
    rt = zr.open(plan=zr.Plan.zero(3), optimizer=zr.SGD(lr=0.1), group=group, **options)
    rt.register("line", {"w": np.zeros(3, np.float32)})
    return rt


def step(rt, value=1.0):
    for _ in range(rt.micro_steps):
        rt.units["line"].reduce({"w": np.full(3, value, np.float32)})
    return rt.step()


def trained(rt, *, steps=None, order=ORDER, **how):
    """Return what all ranks took in each step, in rank order, with a step for each."""
    batches = []
    for indices in rt.take(order, **how):
        counts = rt.group.all_gather(np.array([indices.size])).wait()
        batches.append(rt.group.all_gather(indices, counts=counts.tolist()).wait().tolist())
        step(rt)
        if len(batches) == steps:
            break
    return batches


def expected(order=ORDER, **how):
    return [batch.tolist() for batch in order.batches(**how)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_share_every_batch_of_one_order(ranks):
    def body(group):
        with opened(group) as rt:
            return trained(rt, epochs=2)

    assert run_threads(ranks, body) == [expected(epochs=2)] * ranks


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4), (8, 1), (2, 8)])
@pytest.mark.parametrize("kept", ["save", "last_step"])
def test_another_number_of_ranks_goes_on_in_the_middle_of_an_epoch(tmp_path, before, after, kept):
    options = {"last_step": tmp_path / "c"} if kept == "last_step" else {}

    def first(group):
        with opened(group, **options) as rt:
            taken = trained(rt, steps=8, epochs=2)  # 2 into the second epoch
            if kept == "save":
                rt.save(tmp_path / "c")
            return taken

    def second(group):
        with opened(group, **options) as rt:
            assert (rt.load(tmp_path / "c") if kept == "save" else rt.resume()).updates == 8
            return trained(rt, epochs=2)

    whole = expected(epochs=2)
    assert run_threads(before, first)[0] == whole[:8]
    assert run_threads(after, second)[0] == whole[8:]


def test_a_batch_counts_once_its_step_is_over(tmp_path):
    """A save before the step gives the batch again; one behind it does not, nor does a step that was refused."""

    def body(group):
        with opened(group) as rt:
            taking = rt.take(ORDER)
            next(taking)
            rt.save(tmp_path / "before")
            step(rt)
            rt.save(tmp_path / "behind")
            next(taking)
            with pytest.raises(NonFiniteError):
                step(rt, np.nan)
            rt.save(tmp_path / "refused")
            left = []
            for name in ("before", "behind", "refused"):
                rt.load(tmp_path / name)
                left.append(len(rt.take(ORDER)))
            return left

    assert run_threads(2, body) == [[6, 5, 4]] * 2


def test_a_load_moves_a_loop_that_is_under_way(tmp_path):
    def body(group):
        with opened(group) as rt:
            seen = []
            rt.save(tmp_path / "c")
            for at, indices in enumerate(rt.take(ORDER)):
                seen.append(indices.tolist())
                step(rt)
                if at == 2:
                    rt.load(tmp_path / "c")
            return seen

    whole = expected()
    assert run_threads(1, body) == [whole[:3] + whole]


def test_another_batch_size_goes_on_at_the_same_sample(tmp_path):
    larger = zr.data.Order(length=53, batch=20, seed=7)

    def body(group):
        with opened(group) as rt:
            first = trained(rt, steps=2)
            rt.save(tmp_path / "c")
        with opened(group) as rt:
            rt.load(tmp_path / "c")
            return first + trained(rt, order=larger)

    assert run_threads(2, body)[1] == expected()[:2] + expected(larger, start=20)


@pytest.mark.parametrize(("other", "what"), [({"length": 54}, "length"), ({"seed": 8}, "seed")])
def test_another_datasets_order_is_refused_on_every_rank(tmp_path, other, what):
    changed = zr.data.Order(**{"length": 53, "batch": 10, "seed": 7, **other})

    def body(group):
        with opened(group) as rt:
            trained(rt, steps=1)
            rt.save(tmp_path / "c")
        with opened(group) as rt:
            rt.load(tmp_path / "c")
            with pytest.raises(CallError, match=f"order 'data' to have {what}=") as refused:
                rt.take(changed)
            trained(rt, steps=1)  # the right one goes on
            trained(rt, steps=1, order=zr.data.Order(length=5, batch=2, name="other"))
        with opened(group) as rt:
            trained(rt, steps=1, order=changed)
            with pytest.raises(CheckpointError, match=f"{what}=.*Nothing was changed"):
                rt.load(tmp_path / "c")
            rt.load(tmp_path / "c", optimizer=False)  # parameters alone: a run that begins
            return str(refused.value)

    assert len(set(run_threads(3, body))) == 1


def test_ranks_take_by_capacity():
    def body(group):
        counts = {}
        for name, options, how in (
            ("alike", {}, {}),
            ("shards", {"shard_weights": [1, 1, 3]}, {}),
            ("shares", {"shard_weights": [1, 1, 3]}, {"shares": [0, 1, 1]}),
        ):
            with opened(group, **options) as rt:
                counts[name] = len(next(rt.take(ORDER, **how)))
        return counts

    found = run_threads(3, body)
    assert [one["alike"] for one in found] == [4, 3, 3]
    assert [one["shards"] for one in found] == [2, 2, 6]
    assert [one["shares"] for one in found] == [0, 5, 5]


def test_copies_of_the_model_have_samples_of_their_own():
    def body(group):
        mesh = zr.mesh(shard=2, replicate=2, group=group)
        with opened(None, mesh=mesh, shard_weights=[1, 2]) as rt:
            return trained(rt)

    assert run_threads(4, body) == [expected()] * 4


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(1, {}), (3, {}), (3, {"accumulate": "local"}), (4, {"mesh": zr.mesh(shard=2, replicate=2)}), (5, {}), (8, {})],
)
def test_leaves_of_a_batch_do_not_depend_on_the_number_of_ranks(ranks, how):
    def body(group):
        with opened(group, virtual_shards=8, **how) as rt:
            leaves = []
            for indices in rt.take(ORDER):
                mine = np.array_split(indices, rt.micro_steps)
                leaves.append({at: leaf.tolist() for at, leaf in zip(rt.micro_batches, mine, strict=True)})
                assert sum(map(len, mine)) == indices.size
                step(rt)
            with pytest.raises(CallError, match="virtual_shards"):
                rt.take(ORDER, shares=[1] * group.size)
            return leaves

    found = run_threads(ranks, body)
    for at, batch in enumerate(ORDER.batches()):
        whole = [leaf.tolist() for leaf in np.array_split(batch, 8)]
        assert all(leaf == whole[number] for one in found for number, leaf in one[at].items())
        assert {number for one in found for number in one[at]} == {*range(8)}


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"order": 5}, "Expected a zr.data.Order, got int"),
        ({"epochs": -1}, "Expected epochs"),
        ({"shares": [1]}, "Expected shares to be 2 numbers"),
        ({"shares": [1, -1]}, "Expected shares to be 2 numbers"),
        ({"shares": [0, 0]}, "not all 0"),
        ({"shares": [1, np.nan]}, "Expected shares to be 2 numbers"),
    ],
)
def test_what_one_rank_gets_wrong_is_refused_on_both(how, text):
    def body(group):
        with opened(group) as rt:
            with pytest.raises(CallError, match=text):
                rt.take(**({"order": ORDER} | how if group.rank else {"order": ORDER}))
            with pytest.raises(CallError, match="length: 53 on rank 0 and 54 on rank 1"):
                rt.take(zr.data.Order(length=53 + group.rank, batch=10))
            assert trained(rt) == expected()

    run_threads(2, body)


def test_epochs_count_from_the_beginning_and_a_second_pass_is_asked_for():
    def body(group):
        with opened(group) as rt:
            batches = [trained(rt, epochs=epoch + 1) for epoch in range(3)]
            with pytest.raises(CallError, match="epochs= counts from the order's beginning"):
                rt.take(ORDER, epochs=3)
            endless = rt.take(ORDER, epochs=None)
            with pytest.raises(CallError, match="endless"):
                len(endless)
            assert next(endless).tolist() == ORDER.indices(3 * 53, 3 * 53 + 10).tolist()
            return batches

    (found,) = run_threads(1, body)
    assert [batch for epoch in found for batch in epoch] == expected(epochs=3)


def test_a_loop_says_its_epoch_and_when_that_ends():
    def body(group):
        with opened(group) as rt:
            taking, told = rt.take(ORDER, epochs=2), []
            for _ in taking:
                told.append((taking.epoch, taking.ends_epoch, len(taking)))
                step(rt)
            rt.take(ORDER, epochs=None)
            with pytest.raises(CallError, match="one loop over the order 'data' at a time"):
                next(taking)
            return told

    assert run_threads(1, body) == [[(at // 6, at % 6 == 5, 11 - at) for at in range(12)]]
