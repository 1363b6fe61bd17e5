"""Small models of every kind that a binding meets; each returns its loss from forward."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LENGTH = 64, 32, 12


class Block(nn.Module):
    def __init__(self, width=WIDTH, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.attention(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, c)
        x = x + self.projection(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, *, layers=3, tied=False, recompute=None):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x, y):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h) if self.recompute is None else checkpoint(block, h, use_reentrant=self.recompute)
        logits = self.head(self.norm(h)).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), y.flatten())


class CNN(nn.Module):
    """Two convolutions without biases, which BatchNorm would take out again."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x, y):
        x = x.to(self.head.weight.dtype)
        return F.cross_entropy(self.head(self.pool(self.body(self.stem(x))).flatten(1)), y)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Branching(nn.Module):
    """Each sample goes to the expert that its first token names: ranks use different ones, some are used by none."""

    def __init__(self, experts=4):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x, y):
        h = self.tokens(x)
        route = x[:, 0] % (len(self.experts) - 1)  # never the last
        parts = [self.experts[int(i)](h[route == i]) for i in route.unique()]
        targets = [y[route == i] for i in route.unique()]
        return F.cross_entropy(self.head(torch.cat(parts)).flatten(0, 1), torch.cat(targets).flatten())


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def lora_gpt(layers=3):
    model = GPT(layers=layers).requires_grad_(False)
    for block in model.blocks:
        block.attention, block.up = LoRA(block.attention), LoRA(block.up)
    return model


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):  # theirs go down to float32, whatever the model is in
            model.set_submodule(name, nn.RMSNorm(WIDTH, eps=module.variance_epsilon))
    return Loss(model)


class Loss(nn.Module):
    """A Hugging Face model that returns the loss, on labels that are shifted already."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        return F.cross_entropy(self.inner(input_ids=x).logits.flatten(0, 1), y.flatten())


def text(samples, seed):
    """Return token batches: inputs and targets."""
    tokens = torch.randint(VOCAB, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def branches(samples, seed):
    """Return token batches whose first tokens name two experts, or three; ranks get other ones."""
    x, y = text(samples, seed)
    x[:, 0] = torch.arange(samples) % 12 // (6 - 3 * (seed % 2))
    return x, y


def one_branch(samples, seed):
    """Return token batches that go to one expert, which changes from step to step."""
    x, y = text(samples, seed)
    x[:, 0] = seed % 3
    return x, y


def images(samples, seed):
    """Return images and classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(10, (samples,), generator=generator)
