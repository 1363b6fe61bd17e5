"""`find_tables`: embeddings with sparse gradients, of which rows are gathered and reduced (decision 0171).

What a table cannot be is refused by name, before anything is changed. One that is frozen is gathered whole, as any
other parameter; so is one without ``sparse=True``.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from zerort.errors import CallError
from zerort_torch.model.compiled import named_originals

__all__ = ["find_tables"]

_KINDS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def find_tables(model: torch.nn.Module) -> set[str]:
    """Return the plain names of a model's modules whose rows are gathered and reduced.

    Raises:
        CallError: One of them cannot be; the error names it.
    """
    found = {name: module for name, module in named_originals(model) if _is_sparse(module)}
    if not found:
        return set()
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    for name, module in found.items():
        what = f"{type(module).__name__} {name!r} with sparse=True" if name else f"{type(module).__name__}(sparse=True)"
        if type(module) not in _KINDS or "weight" not in module._parameters:
            raise CallError(
                f"Expected nn.Embedding or nn.EmbeddingBag itself with sparse=True, got {what}, whose forward may use "
                "the whole table. Call a plain one within a module of your own, or leave sparse=True out."
            )
        if module.max_norm is not None:
            raise CallError(
                f"Expected {what} without max_norm, got {module.max_norm}: forward would write to rows that other "
                "ranks own. Leave it out, and bound what forward returns: F.normalize(embedding(x), dim=-1)."
            )
        shared = names[module.weight]
        if len(shared) > 1:
            raise CallError(
                f"Expected the table of {what} in one place, got it as {', '.join(map(repr, shared))}: the others "
                "would need all of its rows. Leave sparse=True out, or give them parameters of their own."
            )
        if module.weight._backward_hooks:
            raise CallError(
                f"Expected the table of {what} without tensor hooks, got some: its gradient comes as the rows of a "
                "batch. Leave sparse=True out, or remove them."
            )
    return set(found)


def _is_sparse(module: torch.nn.Module) -> bool:
    """Say whether a module is an embedding that is trained by sparse gradients."""
    if not isinstance(module, _KINDS) or not module.sparse:
        return False
    return any(parameter.requires_grad for parameter in module.parameters())
