"""Train a Hugging Face model, unchanged, sharded over ranks. Built from a config: nothing is downloaded.

    mpirun -n 2 python examples/train_hf.py                  # Llama
    mpirun -n 2 python examples/train_hf.py --model gpt2     # its head is its embedding (tied)
    mpirun -n 2 python examples/train_hf.py --model t5       # an encoder reads half a row, a decoder writes the other
    mpirun -n 2 python examples/train_hf.py --model bert     # two classes of rows: plain text, and text in rot13

The same text, plans, checkpoints and options as `train_torch.py`. At the end `generate` writes a sample; BERT, which
cannot write, is asked about rows that it has not seen.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a rank is a worker already: more threads than cores only wait
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs the network

import argparse
import codecs
import importlib.util

try:
    import torch
except ModuleNotFoundError:
    raise SystemExit(
        "train_hf.py needs torch, which is not installed: pip install torch (a CPU build will do)"
    ) from None

import numpy as np

import zerort as zr
import zerort_torch as zt
from common import PLANS, Screen, add_options, check_options, whole  # examples/common.py
from zerort import checkpoint
from zerort.workload import ByteText

CONTEXT, HEADS, START = 64, 4, 256  # byte 256 opens what a decoder writes
ROT13 = torch.tensor([*codecs.encode(bytes(range(128)).decode(), "rot13").encode(), *range(128, 256)])


def main() -> None:
    """Open a runtime, shard the model, train it."""
    options = parse()
    torch.manual_seed(0)  # all ranks make the same first values; each keeps its shard of them
    model = build(options).to(getattr(torch, options.dtype))
    numel = sum(parameter.numel() for parameter in model.parameters())
    text = ByteText(rows=options.batch, context=CONTEXT)
    if options.trace:
        zr.trace.enable()
    schedule = zr.warmup_cosine(options.lr, warmup=min(30, options.steps), total=options.steps)
    with zr.open(
        plan=PLANS[options.plan],
        optimizer=zr.AdamW(lr=schedule, betas=(0.9, 0.98), weight_decay=0.01),
        clip_norm=1.0,
        gradient_dtype="float32",
        loss_scale=zr.LossScale() if options.dtype == "float16" else None,
    ) as rt:
        title = f"{type(model).__name__}({numel:,} parameters)"
        model = zt.shard(model, rt)
        position, per = 0, "row" if options.model == "bert" else "byte"
        if options.resume and checkpoint.exists(options.resume):
            position = rt.load(options.resume).progress["position"]

        with Screen(rt, options, model=title, tokens=options.batch * CONTEXT, position=position, per=per) as screen:
            for step in range(position, options.steps):
                batch = inputs(options.model, text, step, rt)
                rows = len(batch["input_ids"])
                loss = rows * rt.size / text.rows * model(**batch).loss  # a rank with fewer rows counts for less
                (loss * rt.loss_scale).backward()
                report = rt.step()
                screen.show(step + 1, loss.item(), report)
                last = report.stop or step + 1 == options.steps  # stop: Ctrl-C, SIGTERM or SIGUSR1, on any rank
                if options.save and ((step + 1) % options.save_every == 0 or last):
                    rt.save(options.save, progress={"position": step + 1})
                if report.stop:
                    break
        screen.summary()
        if options.model == "bert":
            screen.say(f"it is right about {accuracy(model, text, options.steps, rt):.1%} of {8 * text.rows} new rows")
        elif options.sample:
            screen.say(f"it writes: {sample(model, prompt=b'    def ', length=options.sample)!r}")
        if options.trace and (path := rt.group.save_trace(options.trace)):
            screen.say(f"trace: {path} (open it in ui.perfetto.dev)")


def build(options: argparse.Namespace) -> torch.nn.Module:
    """Return a model with fresh values."""
    import transformers as hf

    hf.logging.set_verbosity_error()  # every rank would warn of what configs leave to their defaults
    width, layers = options.width, options.layers
    ids = {"bos_token_id": START, "eos_token_id": None, "pad_token_id": None}
    if options.model == "llama":
        config = hf.LlamaConfig(
            vocab_size=START + 1,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            max_position_embeddings=4 * CONTEXT,
            **ids,
        )
        return hf.LlamaForCausalLM(config)
    if options.model == "gpt2":
        config = hf.GPT2Config(
            vocab_size=START + 1, n_embd=width, n_layer=layers, n_head=HEADS, n_positions=4 * CONTEXT, **ids
        )
        return hf.GPT2LMHeadModel(config)
    if options.model == "bert":
        config = hf.BertConfig(
            vocab_size=START + 1,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            max_position_embeddings=CONTEXT,
            hidden_dropout_prob=0.0,  # what is dropped would depend on the number of ranks
            attention_probs_dropout_prob=0.0,
            num_labels=2,
            pad_token_id=START,
        )
        return hf.BertForSequenceClassification(config)
    config = hf.T5Config(
        vocab_size=START + 1,
        d_model=width,
        d_kv=width // HEADS,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=HEADS,
        decoder_start_token_id=START,
        **(ids | {"pad_token_id": START}),
    )
    return hf.T5ForConditionalGeneration(config)


def inputs(model: str, text: ByteText, step: int, rt: zr.Runtime) -> dict[str, torch.Tensor]:
    """Return this rank's rows of a step, as the model wants them: int64, (rows, bytes)."""
    rows = torch.from_numpy(text.batch(step, rt.rank, of=rt.size)[0]).long()
    if model == "t5":
        half = rows.shape[1] // 2
        return {"input_ids": rows[:, :half], "labels": rows[:, half:].contiguous()}
    if model == "bert":
        labels = rows.sum(1) % 2  # a row's class depends on the row alone, whoever computes it
        return {"input_ids": torch.where(labels[:, None] == 1, ROT13[rows], rows), "labels": labels}
    return {"input_ids": rows, "labels": rows}  # a causal model moves its labels by one itself


@torch.no_grad()
def accuracy(model: torch.nn.Module, text: ByteText, step: int, rt: zr.Runtime) -> float:
    """Return the part of eight new batches that the model is right about, over all ranks."""
    model.eval()
    right = 0
    for later in range(step, step + 8):
        batch = inputs("bert", text, later, rt)
        right += int((model(**batch).logits.argmax(1) == batch["labels"]).sum())
    return float(rt.group.all_reduce(np.array([right])).wait()[0]) / (8 * text.rows)


@torch.no_grad()
def sample(model: torch.nn.Module, *, prompt: bytes, length: int) -> str:
    """Let the model write. All ranks do the same, and draw the same: a gather needs all of them."""
    torch.manual_seed(0)
    model.eval()
    asked = torch.tensor([list(prompt)])
    written = model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=min(length, 2 * CONTEXT),
        do_sample=True,
        temperature=0.6,
        top_k=0,
        suppress_tokens=[START],  # not a byte
    )
    return bytes(token for token in written[0].tolist() if token < START).decode(errors="replace")


def parse() -> argparse.Namespace:
    """Return the options, or say which of them cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, steps=300, batch=16, lr=5e-3)
    parser.add_argument(
        "--model", choices=("llama", "gpt2", "t5", "bert"), default="llama", help="(default: %(default)s)"
    )
    parser.add_argument("--width", type=whole, default=64, help=f"a multiple of {2 * HEADS} (default: %(default)s)")
    parser.add_argument("--layers", type=whole, default=2, help="blocks (default: %(default)s)")
    if parser.parse_known_args()[0].model == "bert":
        parser.set_defaults(lr=2e-3)  # with more, its normed sums run away
    options = parser.parse_args()
    check_options(parser, options)
    if options.width % (2 * HEADS):
        parser.error(f"argument --width: expected a multiple of {2 * HEADS}, got {options.width}")
    if importlib.util.find_spec("transformers") is None:
        parser.error("train_hf.py needs transformers, which is not installed: pip install transformers")
    return options


if __name__ == "__main__":
    main()
