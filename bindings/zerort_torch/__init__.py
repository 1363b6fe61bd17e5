"""torch models on zerort.

    import torch, zerort as zr, zerort_torch as zt

    with zr.open(plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=3e-4)) as rt:     # mpirun -n 8 python this.py
        model = zt.shard(model, rt)                     # parameters lie in the runtime's buffers from now on
        for x, y in batches:
            model(x, y).backward()                      # gathers, and sums gradients as they become ready
            report = rt.step()
        with zt.gathered(model.head):                   # parameters outside of forward
            print(model.head.weight.norm())
        weights = zt.full_state_dict(model)             # on rank 0, under torch's names

    sharding.py      shard(): the hooks of forward            access.py      gathered(), full_state_dict(), gradients()
    optimizer.py     torch's optimizers on shards             as_optimizer.py  a runtime for schedulers, frameworks
    methods.py       register_forward_method()                consolidation.py  consolidate(): a plain model again
    loading.py       an order of samples for a DataLoader

    model/           units, buffers, state_dict, the meta device
    parameters/      live while gathered, stand-ins while released
    backward/        gradients into the sum over ranks, what autograd keeps

Parameters lie where the runtime is: on the host, or on this rank's GPU (``zr.open(group=zr.open_group(kind="nccl"))``).

Public hooks of torch only: nothing is patched, nothing is hung on tensors of the user's own.
"""

try:
    import torch as _torch  # noqa: F401 (whoever has none is told so here, in one line)
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "zerort_torch needs torch, which is not installed: pip install torch (2.4 or later; a CPU build will do).",
        name="torch",
    ) from None

from zerort_torch.access import full_state_dict, gathered, gradients
from zerort_torch.as_optimizer import as_optimizer
from zerort_torch.consolidation import consolidate
from zerort_torch.loading import Collate, OrderSampler
from zerort_torch.methods import register_forward_method
from zerort_torch.optimizer import TorchOptimizer, optimizer
from zerort_torch.sharding import shard

__all__ = [
    "Collate",
    "OrderSampler",
    "TorchOptimizer",
    "as_optimizer",
    "consolidate",
    "full_state_dict",
    "gathered",
    "gradients",
    "optimizer",
    "register_forward_method",
    "shard",
]
