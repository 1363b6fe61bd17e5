"""What to answer to an option that `zr.open` does not have: the nearest name, or ours for another framework's.

    optimiser                        Did you mean optimizer=?
    gradient_accumulation_steps      micro_steps=4: …

The rows of `_ELSEWHERE` are names that people bring along from torch, FSDP, DeepSpeed, Accelerate, Lightning, Horovod
(decision 0065).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

from zerort.errors import CallError

__all__ = ["unknown_options"]

# What it is called elsewhere, and what to write here.
_ELSEWHERE: Final = (
    (
        ("lr", "learning_rate", "weight_decay", "betas", "eps", "momentum"),
        "the optimizer has it, optimizer=zr.AdamW(lr=3e-4, weight_decay=0.1)",
    ),
    (
        ("scheduler", "lr_scheduler", "warmup", "warmup_steps", "num_warmup_steps"),
        "the learning rate is a schedule, optimizer=zr.AdamW(lr=zr.warmup_cosine(3e-4, warmup=200, total=10_000))",
    ),
    (("groups", "parameter_groups", "no_decay"), "param_groups=[zr.ParameterGroup('*.bias', weight_decay=0.0)]"),
    (
        ("zero_stage", "stage", "zero", "zero_optimization", "sharding_strategy", "fsdp", "reshard_after_forward"),
        "a stage is a plan, plan=zr.Plan.zero(3)",
    ),
    (
        ("offload_optimizer", "offload_param", "cpu_offload", "offload_policy", "offload_optimizer_device"),
        "the plan says what rests where, plan=zr.Plan.zero(3, state=zr.Tier.NVME) with scratch='/mnt/nvme', or "
        "zr.Tier.HOST beside a GPU",
    ),
    (("nvme_path", "offload_dir", "offload_folder", "nvme", "swap_dir"), "scratch='/mnt/nvme'"),
    (
        (
            "gradient_accumulation_steps",
            "accumulation_steps",
            "accumulate_grad_batches",
            "grad_accum",
            "backward_passes_per_step",
            "num_micro_batches",
        ),
        "micro_steps=4",
    ),
    (
        ("max_grad_norm", "gradient_clipping", "grad_clip", "clip_grad_norm", "gradient_clip_val", "max_norm"),
        "clip_norm=1.0",
    ),
    (
        ("bf16", "fp16", "amp", "mixed_precision", "mp_policy", "precision", "dtype", "param_dtype", "half"),
        "register parameters of that dtype (the optimizer keeps float32 master weights), and for float16 scale the "
        "loss, loss_scale=zr.LossScale()",
    ),
    (("scaler", "grad_scaler", "init_scale", "initial_scale_power", "dynamic_loss_scale"), "loss_scale=zr.LossScale()"),
    (("reduce_dtype", "grad_reduce_dtype", "communication_data_type"), "gradient_dtype='float32'"),
    (("grad_average", "gradient_average", "average", "op", "gradient_predivide_factor"), "reduction='mean' or 'sum'"),
    (("bucket_cap_mb", "reduce_bucket_size", "allgather_bucket_size"), "a unit has a bucket, and buckets=2 are in use"),
    (("forward_prefetch", "limit_all_gathers", "prefetch_bucket_size", "overlap_comm"), "prefetch=1, units ahead"),
    (("process_group", "comm", "communicator", "backend"), "group=zr.open_group()"),
    (("device_id", "gpu", "gpus", "cuda", "local_rank"), "device='cuda', a GPU for each rank of a host"),
    (("device_mesh", "replicate", "num_replicate"), "mesh=zr.mesh(shard=4, replicate=2)"),
    (("deterministic", "reproducible"), "virtual_shards=8: the same bits on any number of ranks up to 8"),
    (("weights", "capacities"), "shard_weights=[1, 1, 2]"),
    (
        ("world_size", "ranks", "nproc", "nproc_per_node", "num_processes", "rank"),
        "the launcher says how many, mpirun -n 8 python train.py",
    ),
    (
        ("model", "module", "params", "parameters", "model_parameters"),
        'they are registered with what this returns, rt.register("block0", params), or zerort_torch.shard(model, rt)',
    ),
    (
        ("config", "ds_config", "config_params", "args"),
        "there is none but these options, {'stage': 3} is plan=zr.Plan.zero(3); docs/migration.md has the rest",
    ),
    (("timeout",), "the group has it, group=zr.open_group(options=zr.GroupOptions(timeout=60.0))"),
    (
        ("checkpoint", "checkpoint_dir", "save_dir", "output_dir", "resume", "resume_from_checkpoint"),
        "rt.save(path) and rt.load(path); last_step=path keeps every step",
    ),
    (
        ("batch_size", "train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"),
        "the batches are your program's own; micro_steps=4 says how many of them make a step",
    ),
)
_HERE: Final = {name: here for names, here in _ELSEWHERE for name in names}


def unknown_options(given: Collection[str], known: Collection[str]) -> CallError:
    """Return what to raise for options that do not exist.

    Args:
        given: Their names.
        known: The names that do.
    """
    first, *others = sorted(given)
    also = "".join(f" {name}=: {_answer(name, known)}" for name in others)
    return CallError(f"Expected an option of zr.open, got {first}=. {_answer(first, known)}{also}")


def _answer(name: str, known: Collection[str]) -> str:
    here = _HERE.get(name.lower())
    if here is not None:
        return f"Here: {here}."
    close = difflib.get_close_matches(name.lower(), [*known, *_HERE], n=1)
    if not close:
        return f"There are {', '.join(known)}."
    return f"Did you mean {close[0]}=?" if close[0] in known else f"Like {close[0]}? Here: {_HERE[close[0]]}."
