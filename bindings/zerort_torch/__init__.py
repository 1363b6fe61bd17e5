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

    finding.py       which modules are units                  unit.py        parameters come and go
    sharding.py      shard(): the hooks of forward            gradients.py   ready gradients → reductions, in one order
    saved.py         what autograd keeps of a weight          state_dict.py  full weights in and out
    access.py        gathered(), full_state_dict()            optimizer.py   torch's optimizers on shards
    as_optimizer.py  a runtime for schedulers, frameworks     materialise.py meta device
    buffers.py       running statistics, alike on all ranks   memory.py      DLPack, and on which stream
    resting.py       what stands for a released parameter     guard.py       torch's optimizers are refused
    strays.py        parameters that nobody would update      hooks.py       hooks on tensors are carried over
    writes.py        writes to what is only to be read        support.py     what cannot be sharded

Parameters lie where the runtime is: on the host, or on this rank's GPU (``zr.open(group=zr.open_group(kind="nccl"))``).

Public hooks of torch only: nothing is patched, nothing is hung on tensors of the user's own.
"""

from zerort_torch.access import full_state_dict, gathered
from zerort_torch.as_optimizer import as_optimizer
from zerort_torch.optimizer import TorchOptimizer, optimizer
from zerort_torch.sharding import shard

__all__ = ["TorchOptimizer", "as_optimizer", "full_state_dict", "gathered", "optimizer", "shard"]
