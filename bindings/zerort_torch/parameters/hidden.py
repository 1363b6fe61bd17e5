"""`hidden`: functions of ours that `torch.compile` neither traces nor compiles; it breaks its graph there.

What `torch.compiler.disable` does, without its import of the whole compiler, which takes longer than to shard a model,
and without a wrapper round every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

__all__ = ["hidden"]

Function = TypeVar("Function", bound=Callable[..., Any])


def hidden(function: Function) -> Function:
    """Hide a function, and all that it calls, from `torch.compile`."""
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # torch 2.6 and before
        found: Function = torch.compiler.disable(function)
        return found
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))  # where it runs
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # where a traced function calls it
    function._torchdynamo_disable_msg = "zerort gathers or releases parameters here"  # type: ignore[attr-defined]
    return function
