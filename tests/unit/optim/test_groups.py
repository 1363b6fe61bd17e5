"""Parameter groups: who is matched, what is overridden, and what is said about typing errors."""

from __future__ import annotations

import gc

import pytest

from zerort.errors import CallError
from zerort.optim import SGD, AdamW, ParameterGroup, groups, resolve, unmatched

TENSORS = {
    "block0.attn.weight": (8, 8),
    "block0.attn.bias": (8,),
    "block0.norm.scale": (8,),
    "block1.attn.bias": (8,),
    "head.weight": (8, 100),
}


def is_vector(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1


@pytest.mark.parametrize(
    ("match", "names"),
    [
        ("*.bias", {"block0.attn.bias", "block1.attn.bias"}),
        ("block0.*", {"block0.attn.weight", "block0.attn.bias", "block0.norm.scale"}),
        ("head.weight", {"head.weight"}),
        ("weight", set()),  # the whole name counts
        ("*.BIAS", set()),  # and its case
        (("*.norm.*", "head.*"), {"block0.norm.scale", "head.weight"}),
        ("block[1-9].*", {"block1.attn.bias"}),
        (is_vector, {"block0.attn.bias", "block0.norm.scale", "block1.attn.bias"}),
        (lambda name, shape: name.startswith("head"), {"head.weight"}),
    ],
)
def test_who_is_matched(match, names: set[str]) -> None:
    group = ParameterGroup(match)
    assert {name for name, shape in TENSORS.items() if group.matches(name, shape)} == names


def test_the_first_group_that_matches_decides() -> None:
    base = AdamW(lr=1e-3, weight_decay=0.1)
    chosen = [
        ParameterGroup("block0.attn.bias", lr=5e-3),
        ParameterGroup(is_vector, weight_decay=0.0),
        ParameterGroup("*", betas=(0.8, 0.9)),
    ]
    got = {name: resolve(base, chosen, name, shape) for name, shape in TENSORS.items()}
    assert got["block0.attn.bias"] == AdamW(lr=5e-3, weight_decay=0.1)
    assert got["block1.attn.bias"] == got["block0.norm.scale"] == AdamW(lr=1e-3, weight_decay=0.0)
    assert got["head.weight"] == AdamW(lr=1e-3, weight_decay=0.1, betas=(0.8, 0.9))


def test_equal_settings_are_one_object() -> None:
    base = AdamW(lr=1e-3)
    chosen = [
        ParameterGroup("*.bias", weight_decay=0.0),
        ParameterGroup("*.norm.*", weight_decay=0),
        ParameterGroup("head.*", lr=1e-3),  # what holds anyway
    ]
    got = {name: resolve(base, chosen, name, shape) for name, shape in TENSORS.items()}
    assert got["block0.attn.bias"] is got["block1.attn.bias"] is got["block0.norm.scale"]
    assert got["block0.attn.bias"] is not base
    assert got["block0.attn.weight"] is got["head.weight"] is base
    assert resolve(base, [], "head.weight", (8, 100)) is base


def test_schedules_need_not_be_hashable() -> None:
    class Falling:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, update: int) -> float:
            return 1 / update

    group = ParameterGroup("*", lr=Falling())
    one, two = (resolve(SGD(lr=0.1), [group], name, (2,)) for name in "ab")
    assert one is two
    assert one.lr_at(4) == 0.25


def test_optimizers_out_of_use_are_forgotten() -> None:
    gc.collect()
    resolve(SGD(lr=0.1), [ParameterGroup("*", lr=0.0123)], "a", (2,))
    gc.collect()
    kept = resolve(SGD(lr=0.1), [ParameterGroup("*", lr=0.0456)], "a", (2,))
    alive = [reference() for reference in groups._made]
    assert SGD(lr=0.0123) not in alive
    assert any(one is kept for one in alive)


def test_overrides_may_change_the_state() -> None:
    group = ParameterGroup("*.bias", momentum=0.0)
    base = SGD(lr=0.1, momentum=0.9)
    assert resolve(base, [group], "a.bias", (3,)).states((3,)) == ()
    assert len(resolve(base, [group], "a.weight", (3,)).states((3,))) == 1


def test_an_unknown_field_is_named_even_if_nobody_matches() -> None:
    fields = r"fields of AdamW \(lr, betas, eps, weight_decay, master, moments, sparsity\), got 'weigth_decay'. Did"
    with pytest.raises(CallError, match=fields):
        resolve(AdamW(lr=0.1), [ParameterGroup("nobody", weigth_decay=0.0)], "a", (2,))
    with pytest.raises(CallError, match=r"got 'nesterov'\. Use one of these\."):
        resolve(AdamW(lr=0.1), [ParameterGroup("*", nesterov=True)], "a", (2,))


def test_a_bad_value_names_its_group() -> None:
    with pytest.raises(CallError, match=r"Expected lr .*, got -1\. .*ParameterGroup\('\*\.bias', lr=-1\)"):
        resolve(AdamW(lr=0.1), [ParameterGroup("*.bias", lr=-1)], "a.bias", (2,))


@pytest.mark.parametrize("match", [None, 3, "", (), ("a", 3), ["a"]])
def test_bad_matches_are_refused(match) -> None:
    with pytest.raises(CallError, match=r"Expected match to be a pattern, a tuple of patterns or a callable, got"):
        ParameterGroup(match)


def test_patterns_that_match_nothing_are_reported() -> None:
    chosen = [
        ParameterGroup(("*.bias", "*.baias"), lr=0.1),
        ParameterGroup("block0.attn.bias"),  # an earlier group has it, but it matches
        ParameterGroup("blok*"),
        ParameterGroup(is_vector),
        ParameterGroup(lambda name, shape: False),
    ]
    assert unmatched(chosen, TENSORS)[:2] == ["*.baias", "blok*"]
    [_, _, of_lambda] = unmatched(chosen, TENSORS)
    assert of_lambda.endswith("<lambda>")
    assert unmatched([], TENSORS) == []
