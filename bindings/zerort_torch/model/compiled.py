"""Compiled modules (`torch.compile`): names without their wrappers, so that weights and checkpoints fit either way.

torch.compile(block)      an `OptimizedModule`, whose ``_orig_mod`` is the block
block.compile()           the block itself: nothing to do
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["WRAPPED", "hook_compiled", "named_originals", "original", "plain_name"]

WRAPPED = "_orig_mod"
"""What a compiled module calls the module that it was made from."""


def plain_name(name: str) -> str:
    """Return a module's or a parameter's name as it is without compiled modules.

    >>> plain_name("_orig_mod.blocks.0._orig_mod.weight"), plain_name("_orig_mod"), plain_name("a.b")
    ('blocks.0.weight', '', 'a.b')
    """
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def original(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that a compiled one was made from, or the module itself."""
    while isinstance(inner := module._modules.get(WRAPPED), torch.nn.Module):
        module = inner
    return module


def named_originals(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module with its plain name; instead of a compiled one, the module that it was made from."""
    for name, module in model.named_modules():
        if WRAPPED not in module._modules:
            yield plain_name(name), module


def hook_compiled(model: torch.nn.Module) -> None:
    """Have every compiled module leave its wrapper out of ``state_dict()``, and take weights with and without it."""
    for module in model.modules():
        if WRAPPED in module._modules:
            module.register_state_dict_post_hook(_leave_out)
            module.register_load_state_dict_pre_hook(_put_in)


def _leave_out(module: torch.nn.Module, found: Any, prefix: str, metadata: object) -> None:
    for name in list(found):  # all of them: their order stays
        value = found.pop(name)
        inner = name.removeprefix(f"{prefix}{WRAPPED}.")
        found[f"{prefix}{inner}" if inner != name else name] = value


def _put_in(module: torch.nn.Module, state_dict: Any, prefix: str, *rest: object) -> None:
    for name in list(state_dict):
        if name.startswith(prefix) and not name.startswith(f"{prefix}{WRAPPED}."):
            state_dict[f"{prefix}{WRAPPED}.{name.removeprefix(prefix)}"] = state_dict.pop(name)
