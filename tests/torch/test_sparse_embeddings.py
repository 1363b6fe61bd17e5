"""`nn.Embedding(sparse=True)` as rows: the losses of dense torch training, for the rows that a batch touches."""

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F  # noqa: N812
from training import LR, SAMPLES, assert_same, make_wide, part, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.comm import open_group
from zerort.errors import CallError, CollectiveMismatchError, PlanError
from zerort.testing.tolerance import OVER_STEPS

WORLD, STEPS = MPI.COMM_WORLD, 5
USERS, ITEMS, TAGS, WIDTH = 5_000, 97, 31, 6
DECAY = {"weight_decay": 0.1}

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not 2 <= WORLD.size <= 3, reason="rows travel: two and three ranks")]


@pytest.fixture(params=["node", "mpi"])
def group(request, options):
    with open_group(kind=request.param, options=options) as found:
        yield found


class Shop(nn.Module):
    """Users, what they have seen, and tags in bags; one table is used twice in a forward, one has padding."""

    def __init__(self, *, sparse):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=sparse)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=sparse, padding_idx=0)
        self.tags = nn.EmbeddingBag(TAGS, WIDTH, sparse=sparse, mode="sum")
        self.tower = nn.Linear(WIDTH, WIDTH)

    def forward(self, users, seen, tags, target, liked):
        h = self.users(users) + self.items(seen).mean(1) + self.tags(tags)
        score = (self.tower(h) * self.items(target)).sum(-1)
        return F.binary_cross_entropy_with_logits(score, liked.to(score.dtype))


def sparse_shop():
    return Shop(sparse=True)


def dense_shop():
    return Shop(sparse=False)


def clicks(samples, seed):
    rng = torch.Generator().manual_seed(seed)

    def lot(most, *shape):
        return torch.randint(most, (samples, *shape), generator=rng)

    return lot(USERS), lot(9, 4), lot(TAGS, 3), lot(ITEMS), lot(2)


def weights_of(model):
    return {name: value.detach().numpy().copy() for name, value in model.items()}


PLANS = {
    "zero1": (zr.Plan.zero(1), {"micro_steps": 2}, False),
    "zero2": (zr.Plan.zero(2), {"micro_steps": 2, "accumulate": "sharded"}, False),
    "zero3": (zr.Plan.zero(3), {}, False),
    "copies": (zr.Plan.zero(3), {"mesh": zr.mesh(replicate=WORLD.size)}, False),
    "on-disk": (zr.Plan.zero(3, parameter="nvme", state="nvme"), {}, True),
    "budget": (zr.Plan.fit(host="640KiB", nvme="1MiB"), {}, True),  # 160 KiB for each table's missed updates
}


@pytest.mark.parametrize(("plan", "opened", "on_disk"), PLANS.values(), ids=PLANS)
def test_sparse_embeddings_train_as_dense_torch(group, plan, opened, on_disk, tmp_path):
    plain = make_wide(dense_shop)
    expected = train_plain(plain, STEPS, batches=clicks, **DECAY)
    optimizer = zr.AdamW(lr=LR, **DECAY)
    with zr.open(plan=plan, optimizer=optimizer, group=group, scratch=WORLD.bcast(str(tmp_path)), **opened) as rt:
        model = zt.shard(make_wide(sparse_shop), rt)
        assert [name for name, unit in rt.units.items() if unit.tables] == ["users", "items", "tags"]
        assert_same(train_sharded(model, rt, STEPS, batches=clicks), expected, tolerance=1e-10)
        found = weights_of(zt.full_state_dict(model, root=None))
        assert (rt.memory().nvme > 0) == on_disk
    for name, value in weights_of(plain.state_dict()).items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=OVER_STEPS, err_msg=name)


def test_only_rows_of_the_batch_are_gathered_and_reduced(group):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        table = zt.shard(nn.Embedding(10_000, 16, sparse=True), rt)
        rows = table(torch.tensor([[7, 9_999], [7, 7]]))
        assert rows.shape == (2, 2, 16)
        rows.sum().backward()
        report = rt.step()
        assert dict(report.bytes_moved) == {"all_to_all": 2 * 2 * (16 * 4 + 4)}  # two rows, there and back


class Guests(nn.Module):
    """Guests have no row: a rank that has guests only does not call the table, or calls it with nothing."""

    def __init__(self, *, sparse, calls=True):
        super().__init__()
        self.calls = calls
        self.users = nn.Embedding(USERS, WIDTH, sparse=sparse)
        self.tower = nn.Linear(WIDTH, 1)

    def forward(self, users, liked):
        h = torch.zeros(len(users), WIDTH, dtype=self.tower.weight.dtype)
        known = torch.nonzero(users)[:, 0]
        if self.calls or len(known):
            h = h.index_put((known,), self.users(users[known]))
        return F.binary_cross_entropy_with_logits(self.tower(h)[:, 0], liked.to(h.dtype))


def guests(samples, seed):
    """Return a batch of which the first rank has guests only, and the others in every other step."""
    users, *_, liked = clicks(samples, seed)
    return users * (torch.arange(samples) >= samples // 2) * (seed % 2), liked


@pytest.mark.parametrize("branches", [False, True])
def test_ranks_without_rows_take_part(group, branches):
    """By an empty batch; with branches=True also by not calling the module."""
    expected = train_plain(make_wide(lambda: Guests(sparse=False, calls=not branches)), STEPS, batches=guests, **DECAY)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR, **DECAY), group=group) as rt:
        made = make_wide(lambda: Guests(sparse=True, calls=not branches))
        model = zt.shard(made, rt, branches=branches)
        assert_same(train_sharded(model, rt, STEPS, batches=guests), expected, tolerance=1e-10)


def test_whole_tables_are_gathered_saved_loaded_and_given_back(group, tmp_path):
    folder = WORLD.bcast(str(tmp_path))
    expected = train_plain(make_wide(dense_shop), STEPS, batches=clicks, **DECAY)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR, **DECAY), group=group) as rt:
        model = zt.shard(make_wide(sparse_shop), rt)
        train_sharded(model, rt, 2, batches=clicks)
        rt.save(f"{folder}/saved")
        before = weights_of(zt.full_state_dict(model, root=None))
        with zt.gathered(model):
            np.testing.assert_array_equal(model.users.weight.detach().numpy(), before["users.weight"])
            loss = model(*part(clicks(SAMPLES, 2), rt.rank, rt.size))  # nothing is gathered in here
            loss.backward()
        assert np.isclose(rt.mean(loss.item()), expected[2], rtol=1e-10)
        summed = zt.gradients(model)["users.weight"]
        assert summed.shape == (USERS, WIDTH)
        assert torch.count_nonzero(summed.any(1)) == len(torch.unique(clicks(SAMPLES, 2)[0]))
        rt.step()
        assert_same(train_sharded(model, rt, STEPS - 3, batches=clicks, first=3), expected[3:], tolerance=1e-10)

        rt.load(f"{folder}/saved")
        assert_same(train_sharded(model, rt, 2, batches=clicks, first=2), expected[2:], tolerance=1e-10)
        model.load_state_dict({name: torch.from_numpy(value) for name, value in before.items()})
        plain = zt.consolidate(model)
    found = weights_of(plain.state_dict())
    for name, value in before.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert type(plain.users.weight) is nn.Parameter
    plain(*clicks(SAMPLES, 0)).backward()
    assert plain.items.padding_idx == 0
    assert plain.users.weight.grad.is_sparse


def test_virtual_shards_and_cuts_that_change_have_the_same_losses(group):
    expected = train_plain(make_wide(dense_shop), STEPS, batches=clicks, **DECAY)
    optimizer = zr.AdamW(lr=LR, **DECAY)
    with zr.open(plan=zr.Plan.zero(3), optimizer=optimizer, group=group, virtual_shards=8) as rt:
        model = zt.shard(make_wide(sparse_shop), rt)
        assert_same(train_sharded(model, rt, 2, batches=clicks), expected, tolerance=1e-10)
        rt.rebalance(shard_weights=[1 + rank for rank in range(rt.size)])
        assert_same(train_sharded(model, rt, STEPS - 2, batches=clicks, first=2), expected[2:], tolerance=1e-10)


def test_lazy_rows_stay_as_they_are(group):
    with zr.open(plan=zr.Plan.zero(2), optimizer=zr.SGD(lr=LR, weight_decay=0.5), group=group) as rt:
        table = zt.shard(make_wide(lambda: nn.Embedding(9, 2, sparse=True)), rt, lazy=True)
        before = zt.full_state_dict(table, root=None)["weight"]
        table(torch.tensor([3])).sum().backward()
        assert "lazy weight" in rt.step().rows
        same = (zt.full_state_dict(table, root=None)["weight"] == before).all(1)
        assert same.tolist() == [row != 3 for row in range(9)]


def tied_table():
    both = nn.Sequential(nn.Embedding(9, 9, sparse=True), nn.Linear(9, 9, bias=False))
    both[1].weight = both[0].weight
    return both


class Scaled(nn.Embedding):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked_table():
    table = nn.Embedding(9, 2, sparse=True)
    table.weight.register_hook(lambda gradient: gradient)
    return table


REFUSED = {
    "max_norm": (lambda: nn.Embedding(9, 2, sparse=True, max_norm=1.0), {}, "without max_norm, got 1.0.*normalize"),
    "tied": (tied_table, {}, "in one place, got it as '0.weight', '1.weight'.*Leave sparse=True out"),
    "own-class": (lambda: nn.Sequential(Scaled(9, 2, sparse=True)), {}, "got Scaled '0'.*Call a plain one"),
    "hooked": (hooked_table, {}, "without tensor hooks"),
    "replicated-state": (sparse_shop, {"plan": zr.Plan.zero(0)}, "with sharded state, .*without sparse=True"),
}


@pytest.mark.parametrize(("factory", "opened", "text"), REFUSED.values(), ids=REFUSED)
def test_what_rows_cannot_have_is_refused_before_anything_is_registered(node, factory, opened, text):
    with zr.open(**{"plan": zr.Plan.zero(3), "optimizer": zr.AdamW(lr=LR), **opened}, group=node) as rt:
        with pytest.raises((CallError, PlanError), match=f"(?s){text}"):
            zt.shard(factory(), rt)
        assert not rt.units
        with pytest.raises(CallError, match="got one without"):
            zt.shard(dense_shop(), rt, lazy=True)


def test_beside_coded_parameters_rows_travel_as_they_are(group):
    wire = zr.Wire(gather="int8", over="all")
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group, wire=wire) as rt:
        model = zt.shard(sparse_shop(), rt)
        model(*clicks(5, seed=rt.rank)).backward()
        assert rt.step().wire == "gather int8; rows of users.weight, items.weight, tags.weight travel uncoded"


def test_tensors_of_the_host_are_indices(group):
    table = np.arange(12.0).reshape(6, 2)
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        unit = rt.register("embed", {"table": table}, rows=("table",))
        with unit.gathered(rows={"table": torch.tensor([4, 1])}) as p:
            assert np.array_equal(p["table"], table[[4, 1]])


def test_wrong_indices_and_a_rank_that_stays_away_are_told(group):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=group) as rt:
        model = zt.shard(make_wide(sparse_shop), rt)
        bad = USERS if rt.rank == 1 else 0
        with pytest.raises(CallError, match=f"from 0 to {USERS - 1}, got {USERS}"):
            model.users(torch.tensor([bad]))
        with pytest.raises(CallError, match="as whole numbers"):
            model.users(torch.tensor([0.5]) if rt.rank else torch.tensor([0]))
        model.users(torch.tensor([3]))
        with pytest.raises(CollectiveMismatchError, match="rows of users.weight" if rt.rank else "branches=True"):
            rt.mean(0.0) if rt.rank else model.users(torch.tensor([0]))
