"""A newcomer's first mistakes: each is answered with what was expected, what came, and what to write."""

import dataclasses
import inspect
import traceback

import numpy as np
import pytest

import zerort as zr
from zerort.engine import RuntimeOptions
from zerort.errors import CallError, ClosedError, PlanError, UnitStateError
from zerort.testing.threads import run_threads

PARAMETERS = {"w": np.ones((4, 4), np.float32)}


def refused(error=CallError, **arguments):
    """Return what two ranks are told that open a runtime so."""

    def body(group):
        with pytest.raises(error) as caught:
            zr.open(**{"group": group, **arguments})
        group.barrier().wait()
        return str(caught.value)

    first, second = run_threads(2, body)
    assert second in (first, f"{first} (rank 0)")
    return first


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("optimiser", "Did you mean optimizer=?"),
        ("clipnorm", "Did you mean clip_norm=?"),
        ("Micro_Steps", "Did you mean micro_steps=?"),
        ("lr", "optimizer=zr.AdamW(lr=3e-4"),
        ("gradient_accumulation_steps", "micro_steps=4"),
        ("deterministic", "virtual_shards=8"),
        ("gradient_acumulation_step", "micro_steps=4"),
        ("zero_stage", "plan=zr.Plan.zero(3)"),
        ("bf16", "register parameters of that dtype"),
        ("max_grad_norm", "clip_norm=1.0"),
        ("groups", "param_groups=[zr.ParameterGroup("),
        ("weights", "shard_weights=[1, 1, 2]"),
        ("nvme_path", "scratch='/mnt/nvme'"),
        ("world_size", "mpirun -n 8 python train.py"),
        ("config", "docs/migration.md"),
        ("offload_optimizer", "state=zr.Tier.NVME) with scratch="),
        ("xyzzy", "There are plan, optimizer, "),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(name, answer):
    told = refused(**{name: 1})
    assert told.startswith(f"Expected an option of zr.open, got {name}=. ")
    assert answer in told


def test_several_unknown_options_are_all_named():
    told = refused(gradient_clipping=1.0, gradient_accumulation_steps=4)
    assert "micro_steps=4" in told
    assert told.endswith(" gradient_clipping=: Here: clip_norm=1.0.")


def test_the_answer_is_short_and_shows_no_insides():
    with zr.open_group(kind="solo") as group, pytest.raises(CallError) as caught:
        zr.open(group=group, optimiser=None)
    files = [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files == ["test_opening.py", "opening.py", "agreed.py"]
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_one_rank_that_misspells_stops_all():
    def body(group):
        with pytest.raises(CallError, match=r"got optimiser=\. Did you mean optimizer=\?"):
            zr.open(group=group, **({"optimiser": None} if group.rank == 1 else {}))

    run_threads(2, body)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"clip_norm": "1.0"}, "Expected clip_norm to be a number above 0 and finite, got '1.0'. Write clip_norm=1.0"),
        ({"clip_norm": True}, "Expected clip_norm to be a number"),
        ({"loss_scale": "dynamic"}, "got 'dynamic'. Write loss_scale=zr.LossScale() for a dynamic one"),
        ({"micro_steps": "4"}, "Expected micro_steps to be an int of at least 1, got '4'."),
        ({"prefetch": 1.0}, "Expected prefetch to be an int"),
        ({"buckets": None}, "Expected buckets to be an int"),
        ({"reduction": "average"}, "Expected reduction to be one of 'mean', 'sum'; got 'average'."),
        ({"nonfinite": np.ones(2)}, "Expected nonfinite to be one of 'raise', 'skip'"),
        ({"gradient_dtype": np.float32}, "Expected gradient_dtype to be one of None, 'float32'"),
        ({"virtual_shards": "8"}, "Expected virtual_shards to be an int"),
        ({"digest": 1}, "Expected digest to be True or False, got 1."),
        ({"shard_weights": "12"}, "Expected shard_weights to be numbers"),
        ({"shard_weights": [1, "2"]}, "Expected shard_weights to be numbers"),
        ({"scratch": 3}, "Expected scratch to be a directory or several, got 3."),
        ({"create_scratch": "yes"}, "Expected create_scratch to be True or False, got 'yes'."),
        ({"offload": "host"}, "Expected offload to be OffloadOptions"),
        ({"last_step": 1}, "Expected last_step to be a directory"),
        ({"plan": 3}, "got 3. Write zr.Plan.zero(3)."),
        ({"plan": "ZeRO-2"}, "Write zr.Plan.zero(2)."),
        ({"plan": zr.Plan}, "got the class Plan."),
        ({"optimizer": "adamw"}, "Expected optimizer to be one such as zr.AdamW(lr=1e-3), got 'adamw'."),
        ({"optimizer": zr.SGD}, "got the class SGD. Make one of it: zr.SGD(lr=1e-3)."),
        ({"param_groups": zr.ParameterGroup("*")}, "Expected param_groups to be a list of parameter groups"),
        ({"param_groups": ["*.bias"]}, "Expected param_groups to be a list of parameter groups"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_by_name(arguments, told):
    assert told in refused(**arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"group": "world"}, r"Expected group to be a Group, which zr.open_group\(\) opens, got 'world'."),
        ({"mesh": 4}, r"Expected mesh to be one such as zr.mesh\(shard=4, replicate=2\), got 4."),
        ({"device": "gpu"}, r"Expected device to be 'host' or 'cuda', got 'gpu'."),
    ],
)
def test_ranks_that_are_none_are_refused_by_name(arguments, told):
    with pytest.raises(CallError, match=told):
        zr.open(**arguments)


def test_every_option_is_in_the_signature_with_its_default_and_its_meaning():
    """An editor completes them, `help(zr.open)` explains them, a type checker refuses others."""
    parameters = inspect.signature(zr.open).parameters
    for field in dataclasses.fields(RuntimeOptions):
        assert parameters[field.name].default == field.default, field.name
        assert parameters[field.name].annotation == field.type, field.name
    for name in parameters:
        assert f"        {'**' * (name == 'unknown')}{name}: " in zr.open.__doc__, name
    nouns = {"plan", "optimizer", "param_groups", "group", "mesh", "device", "unknown"}
    assert parameters.keys() - nouns == {field.name for field in dataclasses.fields(RuntimeOptions)}


def test_plan_and_optimizer_may_come_first():
    with zr.open_group(kind="solo") as group, zr.open(zr.Plan.zero(1), zr.SGD(lr=0.1), group=group) as rt:
        assert rt.context.plan == zr.Plan.zero(1)
        assert rt.context.optimizer == zr.SGD(lr=0.1)


@pytest.mark.parametrize("stage", [4, -1, "3", 3.0, True, [3], None])
def test_a_stage_that_is_none_is_refused(stage):
    with pytest.raises(PlanError, match="Expected a ZeRO stage out of 0, 1, 2, 3; got"):
        zr.Plan.zero(stage)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"comm": "nccl"}, r"Expected comm to be a communicator .* A kind is named: zr.open_group\(kind=…\)"),
        ({"options": {"timeout": 3}}, "Expected options to be GroupOptions"),
        ({"device": "cuda:0"}, "Expected device= with kind='nccl' only, got kind=None and device='cuda:0'."),
    ],
)
def test_a_group_of_wrong_arguments_is_refused_by_name(arguments, told):
    with pytest.raises(CallError, match=told):
        zr.open_group(**arguments)


def test_a_group_has_its_device_and_a_mesh_may_have_its_group():
    with zr.open_group(kind="solo") as group:
        with pytest.raises(CallError, match=r"Expected device='cuda' where the runtime opens its own group.*on host"):
            zr.open(group=group, device="cuda")
        with pytest.raises(CallError, match=r"got that of zr.open and that of the mesh"):
            zr.open(group=group, mesh=zr.mesh(group=group))
        with zr.open(group=group, mesh=zr.mesh(shard=1), device="host") as rt:
            assert rt.group is group
        assert group.all_reduce(np.ones(3, np.float32)).wait().sum() == 3  # it is the caller's, and open


def test_a_mesh_is_a_value_and_opens_nothing():
    assert zr.mesh(shard=4, replicate=2) == zr.mesh(replicate=2, shard=4)
    with pytest.raises(PlanError, match="Expected shard and replicate to be whole numbers above 0, got 0 and 1"):
        zr.mesh(shard=0)
    with pytest.raises(PlanError, match=r"Expected shard \* replicate to be the number of ranks \(1\), got 4 \* 2"):
        zr.open(mesh=zr.mesh(shard=4, replicate=2))
    with zr.open(mesh=zr.mesh(shard=1)) as rt:
        group = rt.group
    with pytest.raises(ClosedError):
        group.barrier()


def test_a_mesh_over_no_group_is_refused():
    with pytest.raises(CallError, match="Expected group to be a Group"):
        zr.mesh(group="world")


@pytest.mark.parametrize(
    ("verb", "error", "told"),
    [
        (
            lambda rt: rt.register("b", [[1.0]]),
            CallError,
            r"got list\. Name them: rt\.register\('b', \{\"w\": array\}\)",
        ),
        (lambda rt: rt.register("b", {"w": [1.0]}), CallError, "got list. Make it an array: np.array"),
        (lambda rt: rt.step(), UnitStateError, r"got none .* Register parameters first: rt\.register"),
        (
            lambda rt: rt.register("b", PARAMETERS).gathered()["w"],
            UnitStateError,
            r"Write `with unit\.gathered\(\) as p:`",
        ),
        (
            lambda rt: dict(rt.register("b", PARAMETERS).gathered()),
            UnitStateError,
            r"Write `with unit\.gathered\(\) as p:`",
        ),
    ],
    ids=["register a list", "register lists", "step first", "no with", "no with, iterated"],
)
def test_verbs_that_are_used_wrongly_say_what_to_write(verb, error, told):
    with zr.open_group(kind="solo") as group, zr.open(group=group) as rt, pytest.raises(error, match=told):
        verb(rt)


def test_on_a_host_a_runtime_speaks_of_memory():
    plan = zr.Plan.zero(3, gradient=zr.Tier.HOST, state=zr.Tier.NVME)
    with zr.open_group(kind="solo") as group, zr.open(plan=plan, group=group) as rt:
        assert "parameter SHARDED in memory | gradient SHARDED in memory | state SHARDED on NVME" in repr(rt)
    assert plan.describe(gpus=True) == str(plan)
    assert "parameter SHARDED on DEVICE | gradient SHARDED on HOST" in str(plan)
