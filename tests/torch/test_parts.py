"""Parts of a sharded model that are called from outside, methods besides forward, and tied modules called alone."""

import pytest
import torch
from models import GPT, Block, text
from mpi4py import MPI
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)
from training import LR, assert_same, make_wide, train_plain, train_sharded

import zerort as zr
import zerort_torch as zt
from zerort.comm import open_group
from zerort.errors import CallError, StaleViewError

pytestmark = pytest.mark.mpi

STEPS = 2


@pytest.fixture(scope="module")
def apart(options):
    """Ranks without shared memory: there gathered units come and go."""
    with open_group(kind="mpi", options=options) as found:
        yield found


@pytest.fixture
def rt(apart):
    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=LR), group=apart) as found:
        yield found


@pytest.fixture(params=["node", "mpi", "nvme"])
def rt_anywhere(request, apart, tmp_path):
    """The same on ranks with shared memory, and with parameters on NVMe."""
    on_disk = {"parameter": zr.Tier.NVME, "state": zr.Tier.NVME} if request.param == "nvme" else {}
    scratch = MPI.COMM_WORLD.bcast(str(tmp_path)) if on_disk else None
    group = request.getfixturevalue("node") if request.param == "node" else apart
    with zr.open(plan=zr.Plan.zero(3, **on_disk), optimizer=zr.AdamW(lr=LR), group=group, scratch=scratch) as found:
        yield found
    MPI.COMM_WORLD.Barrier()


class Outside(GPT):
    """Calls the parts of its blocks, and no block."""

    def forward(self, x, y):
        h = self.tokens(x)
        for block in self.blocks:
            h = h + block.down(F.gelu(block.up(block.norm2(h))))
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Methods(GPT):
    """Has a method that uses a parameter of a part, and one that calls modules only."""

    def embed(self, x):
        return F.embedding(x, self.tokens.weight) + self.positions.weight[: x.shape[1]]

    def encode(self, h):
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    def forward(self, x, y):
        return F.cross_entropy(self.encode(self.embed(x)).flatten(0, 1), y.flatten())


class Tied(torch.nn.Module):
    """Two towers that share an embedding, each with blocks of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GPT(layers=2), GPT(layers=2)
        self.second.tokens.weight = self.first.tokens.weight
        self.second.blocks[0].up = self.first.blocks[0].up

    def forward(self, x, y):
        return self.first(x, y) + self.second(x, y)


def test_parts_of_a_block_called_from_outside_train_as_in_plain_torch(rt_anywhere):
    expected = train_plain(make_wide(lambda: Outside(layers=2)), STEPS)
    model = zt.shard(make_wide(lambda: Outside(layers=2)), rt_anywhere, units=Block)
    assert_same(train_sharded(model, rt_anywhere, STEPS), expected)


def test_a_part_that_is_called_alone_leaves_its_gradients(rt):
    """Outside of any forward of the model: its weights last until backward has used them."""
    plain, (x, y) = make_wide(GPT), text(2, 0)
    model = zt.shard(make_wide(GPT), rt, units=Block)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)

    def loss_of(one):
        h = one.tokens(x)
        block = one.blocks[1]
        return F.cross_entropy(one.head(block.down(F.gelu(block.up(h)))).flatten(0, 1), y.flatten())

    for _ in range(2):
        loss_of(plain).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        rt.step()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model), loss_of(plain), rtol=1e-10, atol=0)


def test_tied_modules_called_alone_hold_the_unit_that_owns_their_weights(rt):
    expected = train_plain(make_wide(Tied), STEPS)
    plain, model = make_wide(Tied), zt.shard(make_wide(Tied), rt, units=Block)
    x, y = text(2, 0)
    with torch.no_grad():
        assert torch.equal(model.second(x, y), plain.second(x, y))
        assert torch.equal(model.second.tokens(x), plain.second.tokens(x))
    h = torch.ones(2, 4, 32, dtype=torch.float64)
    assert torch.equal(model.second.blocks[0].up(h), plain.second.blocks[0].up(h))
    rt.discard_gradients()
    assert_same(train_sharded(model, rt, STEPS), expected)


def test_a_method_that_uses_parameters_is_registered(rt):
    plain, (x, _) = make_wide(Methods), text(2, 0)
    model = zt.shard(make_wide(Methods), rt, units=Block)
    h = plain.embed(x)
    with torch.no_grad():
        assert torch.equal(model.encode(h), plain.encode(h))  # it only calls modules
        with pytest.raises(StaleViewError, match=r"zt.register_forward_method\(module, 'embed'\)"):
            model.embed(x)
        zt.register_forward_method(model, "embed")
        zt.register_forward_method(model, "embed")
        assert torch.equal(model.embed(x), h)
    assert_same(train_sharded(model, rt, STEPS), train_plain(make_wide(Methods), STEPS))
    assert "embed" not in vars(zt.consolidate(model))
    model.embed(x)


def test_a_registered_method_leaves_its_gradients_and_its_errors(rt):
    plain, (x, _) = make_wide(Methods), text(2, 0)
    model = zt.shard(make_wide(Methods), rt, units=Block)
    zt.register_forward_method(model, "embed")
    zt.register_forward_method(model, "encode")
    with pytest.raises(RuntimeError):
        model.encode(torch.ones(2, 3, 5))  # of another width: what was gathered is released all the same
    plain.encode(plain.embed(x)).square().mean().backward()
    model.encode(model.embed(x)).square().mean().backward()
    norm = torch.cat([one.grad.flatten() for one in plain.parameters() if one.grad is not None]).norm().item()
    assert rt.step().grad_norm == pytest.approx(norm, rel=1e-10)


def test_a_method_that_is_not_there_is_refused(rt):
    model = zt.shard(make_wide(GPT), rt)
    with pytest.raises(CallError, match=r"Expected the name of a method of GPT, got 'decode'"):
        zt.register_forward_method(model, "decode")
    with pytest.raises(CallError, match=r"Expected a module of a sharded model"):
        zt.register_forward_method(GPT(), "forward")


def test_an_encoder_called_alone_generates_as_in_plain_torch(apart):
    """BART's: `generate` calls the encoder without its model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=40,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    plain = transformers.BartForConditionalGeneration(config).eval()
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    tokens = torch.arange(4, 12)[None]
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    with zr.open(plan=zr.Plan.zero(3), group=apart) as rt:
        model = zt.shard(model, rt)
        with torch.no_grad():
            expected = plain.get_encoder()(tokens).last_hidden_state
            assert torch.equal(model.get_encoder()(tokens).last_hidden_state, expected)
        assert torch.equal(model.generate(tokens, **settings), plain.generate(tokens, **settings))
