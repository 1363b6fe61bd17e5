"""Models that cannot be sharded as they are, each refused with its cure before anything is changed."""

from __future__ import annotations

import torch

from zerort.errors import CallError

__all__ = ["check_supported"]


def check_supported(model: torch.nn.Module) -> None:
    """Refuse a model with modules or parameters that a runtime cannot hold.

    Raises:
        CallError: It has one; the error names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CallError(
                f"Expected modules of Python, got the scripted module {name!r}, whose parameters cannot be replaced "
                "while it is released. Shard the model that it was made from; torch.jit.script comes after training."
            )
        if isinstance(module, torch.nn.SyncBatchNorm) and not torch.distributed.is_initialized():
            raise CallError(
                f"Expected batch norms without a process group, got SyncBatchNorm {name!r}: without torch.distributed "
                "it normalises each rank's batch alone, as BatchNorm does. Use nn.BatchNorm, whose running statistics "
                "are rank 0's after every step, nn.GroupNorm, or torch.distributed.init_process_group(…) beside MPI."
            )
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise CallError(
                f"Expected parameters with a shape, got {name!r}, which a lazy module makes in its first forward. Run "
                "one forward on a small batch before zt.shard(model, rt)."
            )
        if parameter.is_complex():
            raise CallError(
                f"Expected parameters of real numbers, got {name!r} in {parameter.dtype}. Convert it: keep "
                "torch.view_as_real(w) as the parameter, and use torch.view_as_complex(self.w) in forward."
            )
