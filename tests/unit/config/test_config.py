"""Plans look rows up and refuse what nothing can serve; options prove themselves and read the environment."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerort import config
from zerort.config import ENVIRONMENT, ZERO, Budget, GroupOptions, Plan, Residence, Tier, format_bytes, parse_bytes
from zerort.errors import CallError, PlanError
from zerort.layout import Placement

R, P, S = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED

# ── plans ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("stage", "row"), [(0, (R, R, R)), (1, (R, P, S)), (2, (R, S, S)), (3, (S, S, S))])
def test_a_stage_is_a_row(stage: int, row: tuple[Placement, ...]) -> None:
    plan = Plan.zero(stage)
    assert (plan.parameter.placement, plan.gradient.placement, plan.state.placement) == row
    assert {plan.parameter.tier, plan.gradient.tier, plan.state.tier} == {Tier.DEVICE}


def test_tiers_go_to_their_part() -> None:
    plan = Plan.zero(3, parameter=Tier.NVME, gradient=Tier.HOST, state=Tier.DEVICE)
    assert plan == Plan(
        parameter=Residence(S, tier=Tier.NVME), gradient=Residence(S, tier=Tier.HOST), state=Residence(S)
    )


def test_only_plans_that_can_be_served_are_made() -> None:
    legal = set()
    for row in itertools.product(Placement, repeat=3):
        try:
            Plan(*map(Residence, row))
        except PlanError:
            continue
        legal.add(row)
    assert legal == {(R, R, R), (R, P, R), (R, P, S), (R, S, S), (S, S, S)}
    assert set(ZERO.values()) <= legal


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((P, S, S), r"^Expected the parameter to be REPLICATED or SHARDED, got PARTIAL\. Parameters are values"),
        ((R, P, P), r"^Expected the state to be REPLICATED or SHARDED, got PARTIAL\. Optimizer state"),
        ((S, P, S), r"^Expected the gradient beside a SHARDED parameter to be SHARDED, got PARTIAL\. A rank"),
        ((S, S, R), r"^Expected the state beside a SHARDED gradient to be SHARDED, got REPLICATED\. A rank"),
        ((R, R, S), r"^Expected the gradient beside a SHARDED state to be PARTIAL or SHARDED, got REPLICATED\. Summ"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_how_to_cure_it(row: tuple[Placement, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(*map(Residence, row))


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        (3, {"secondary": "node"}, r"Expected secondary to be 'host', or None for no second copy, got 'node'\."),
        (2, {"secondary": "host"}, r"Expected SHARDED parameters with secondary='host', got REPLICATED ones, .*zero"),
        (
            3,
            {"secondary": "host", "parameter": Tier.NVME},
            r"Expected parameters in memory with secondary='host'.*NVME",
        ),
    ],
)
def test_a_second_copy_is_of_shards_in_memory(stage: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.zero(stage, **settings)
    plan = Plan.zero(3, secondary="host")
    assert str(plan) == f"{Plan.zero(3)} | gathered parameters on each host"
    assert eval(repr(plan), {**vars(config), "Placement": Placement}) == plan != Plan.zero(3)
    with pytest.raises(PlanError, match=r"Expected ranks that compute on the host with secondary='host', got GPUs"):
        plan.check_device(on_gpus=True)


@pytest.mark.parametrize("stage", [4, -1, "3", None])
def test_unknown_stages_are_refused(stage: int) -> None:
    with pytest.raises(PlanError, match=rf"^Expected a ZeRO stage out of 0, 1, 2, 3; got {stage!r}\."):
        Plan.zero(stage)


def test_a_tier_may_be_given_by_its_name() -> None:
    assert Plan.zero(3, parameter="host", state="nvme") == Plan.zero(3, parameter=Tier.HOST, state=Tier.NVME)
    with pytest.raises(CallError, match=r"Expected a Tier \(.*\) or its name \('device', .*\), got 'disk'"):
        Plan.zero(3, state="disk")  # type: ignore[arg-type]


def test_text_is_no_placement_or_residence() -> None:
    with pytest.raises(CallError, match=r"Expected a Tier \(Tier\.DEVICE, Tier\.HOST, Tier\.NVME\), got 'nvme'"):
        Residence(S, tier="nvme")  # type: ignore[arg-type]
    with pytest.raises(CallError, match=r"Expected a Placement \(.*\), got 'sharded'"):
        Residence("sharded")  # type: ignore[arg-type]
    with pytest.raises(CallError, match=r"Expected a Residence for the gradient, got Placement\.SHARDED"):
        Plan(Residence(S), S, Residence(S))  # type: ignore[arg-type]


def test_a_plan_reads_as_a_row_and_its_repr_as_code() -> None:
    plan = Plan.zero(2, state=Tier.HOST)
    assert str(plan) == "parameter REPLICATED on DEVICE | gradient SHARDED on DEVICE | state SHARDED on HOST"
    assert eval(repr(plan), {**vars(config), "Placement": Placement}) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(Plan.zero(2, state=Tier.HOST)) == hash(plan)


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("4MiB", 4 * 1024**2),
        ("256K", 256 * 1024),
        ("64k", 64 * 1024),
        ("64kib", 64 * 1024),
        ("1GiB", 1024**3),
        (" 1.5 GiB ", 3 * 1024**3 // 2),
        ("2KB", 2000),
        ("0.5T", 1024**4 // 2),
        ("3PiB", 3 * 1024**5),
    ],
)
def test_sizes_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "4 megs", "1e6", "1.5", "4MiBs", "4iB", "4 4K", "\u0661K", None, 4])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(CallError, match=r"^Expected a whole number of bytes such as '4096', '256K' or '4MiB', got"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1536, "1.5KiB"), (1024**2 - 1, "1MiB"), (5 * 1024**6, "5120PiB")],
)
def test_sizes_are_written_short(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(1, 1023), st.integers(0, 5))
@settings(max_examples=100)
def test_round_sizes_survive_the_way_there_and_back(amount: int, power: int) -> None:
    assert parse_bytes(format_bytes(amount * 1024**power)) == amount * 1024**power


@given(st.integers(0, 2**60))
@settings(max_examples=100)
def test_what_is_written_is_close(nbytes: int) -> None:
    number = format_bytes(nbytes).rstrip("BiKMGTP")
    unit = format_bytes(nbytes)[len(number) :]
    scale = {"B": 1, **{f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGTP")}}[unit]
    assert float(number) < 1024 or unit == "PiB"
    assert abs(float(number) * scale - nbytes) <= 0.00501 * scale


@given(st.integers(0, 2**60))
@settings(max_examples=100)
def test_what_is_written_can_be_read_and_rounded_up_is_not_less(nbytes: int) -> None:
    assert format_bytes(parse_bytes(format_bytes(nbytes))) == format_bytes(nbytes)
    text = format_bytes(nbytes, up=True)
    assert nbytes <= parse_bytes(text) <= nbytes * 1.01
    assert format_bytes(parse_bytes(text)) == text


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(CallError, match="at least 0, got -1"):
        format_bytes(-1)


# ── options ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("ZERORT_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_defaults() -> None:
    flight_dir = os.path.join(tempfile.gettempdir(), f"zerort-flight-{os.getuid()}")
    assert dataclasses.asdict(GroupOptions()) == {
        "timeout": 300.0,
        "eager_nbytes": 1048576,
        "staging_nbytes": 4194304,
        "message_nbytes": 1073741824,
        "exchange_nbytes": 8388608,
        "shm_dir": "/dev/shm",
        "flight_dir": flight_dir,
        "flight_length": 256,
        "cross_memory": True,
        "sockets": "auto",
        "full_traceback": False,
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("timeout", 0, "above 0 and finite, got 0"),
        ("timeout", -1.0, "above 0 and finite"),
        ("timeout", float("inf"), "above 0 and finite, got inf"),
        ("timeout", float("nan"), "above 0 and finite, got nan"),
        ("timeout", "60", "a number of seconds, got '60'"),
        ("timeout", True, "a number of seconds, got True"),
        ("eager_nbytes", -1, "an int of at least 0, got -1"),
        ("eager_nbytes", 1.5, "an int of at least 0, got 1.5"),
        ("staging_nbytes", 0, "an int of at least 64 and a multiple of 64, got 0"),
        ("staging_nbytes", 100, "multiple of 64, got 100"),
        ("message_nbytes", 2**31, "an int from 64 to 2147483584 and a multiple of 64, got 2147483648"),
        ("message_nbytes", 65, "multiple of 64, got 65"),
        ("exchange_nbytes", 63, "an int of at least 64"),
        ("exchange_nbytes", "8MiB", "an int of at least 64 and a multiple of 64, got '8MiB'"),
        ("shm_dir", "shm", "absolute path of a directory, got 'shm'"),
        ("shm_dir", None, "absolute path of a directory, got None"),
        ("flight_dir", "", "path of a directory, got ''"),
        ("flight_length", 0, "an int of at least 1, got 0"),
        ("flight_length", True, "an int of at least 1, got True"),
        ("cross_memory", 1, "True or False, got 1"),
    ],
)
def test_bad_options_are_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(CallError, match=f"^Expected {field} to be .*{message}"):
        GroupOptions(**{field: value})  # type: ignore[arg-type]


def test_edges_are_legal() -> None:
    options = GroupOptions(eager_nbytes=0, staging_nbytes=64, message_nbytes=2**31 - 64, exchange_nbytes=64, timeout=1)
    assert (options.eager_nbytes, options.message_nbytes) == (0, 2147483584)


def test_options_are_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        GroupOptions(30.0)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        GroupOptions().timeout = 3  # type: ignore[misc]


GOOD = {
    "ZERORT_TIMEOUT": ("12.5", 12.5),
    "ZERORT_EAGER_BYTES": ("0", 0),
    "ZERORT_STAGING_BYTES": ("64k", 65536),
    "ZERORT_MESSAGE_BYTES": ("1MiB", 1048576),
    "ZERORT_EXCHANGE_BYTES": ("256K", 262144),
    "ZERORT_SHM_DIR": ("/mnt/shm", "/mnt/shm"),
    "ZERORT_FLIGHT_DIR": ("records", "records"),
    "ZERORT_FLIGHT_LENGTH": ("16", 16),
    "ZERORT_CROSS_MEMORY": ("off", False),
    "ZERORT_SOCKETS": ("never", "never"),
    "ZERORT_FULL_TRACEBACK": ("yes", True),
}


def test_every_option_has_one_variable_with_help() -> None:
    assert set(GOOD) == set(ENVIRONMENT)
    assert sorted(variable.field for variable in ENVIRONMENT.values()) == sorted(
        field.name for field in dataclasses.fields(GroupOptions)
    )
    assert all(variable.help and variable.expects for variable in ENVIRONMENT.values())


def test_without_variables_the_defaults_hold(clean: pytest.MonkeyPatch) -> None:
    assert GroupOptions.from_environment() == GroupOptions()
    clean.setenv("ZERORT_TIMEOUT", " ")
    assert GroupOptions.from_environment() == GroupOptions()


@pytest.mark.parametrize("name", GOOD)
def test_each_variable_sets_its_field_and_no_other(clean: pytest.MonkeyPatch, name: str) -> None:
    text, value = GOOD[name]
    clean.setenv(name, text)
    field = ENVIRONMENT[name].field
    assert getattr(GroupOptions(), field) != value
    expected = dataclasses.replace(GroupOptions(), **{field: value})
    assert GroupOptions.from_environment() == expected


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("True", True), ("YES", True), ("on", True), ("0", False), ("no", False)]
)
def test_switches(clean: pytest.MonkeyPatch, text: str, value: bool) -> None:
    clean.setenv("ZERORT_CROSS_MEMORY", text)
    assert GroupOptions.from_environment().cross_memory is value


def test_what_is_passed_wins_and_its_variable_is_not_read(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("ZERORT_TIMEOUT", "soon")
    clean.setenv("ZERORT_FLIGHT_LENGTH", "8")
    options = GroupOptions.from_environment(timeout=7.0)
    assert (options.timeout, options.flight_length) == (7.0, 8)


@pytest.mark.parametrize(
    ("name", "text", "expects"),
    [
        ("ZERORT_TIMEOUT", "soon", "seconds above 0"),
        ("ZERORT_TIMEOUT", "-5", "seconds above 0"),
        ("ZERORT_TIMEOUT", "inf", "seconds above 0"),
        ("ZERORT_STAGING_BYTES", "4 megs", "a size such as '4MiB' or '256K'"),
        ("ZERORT_STAGING_BYTES", "100", "a size such as '4MiB' or '256K'"),
        ("ZERORT_MESSAGE_BYTES", "4GiB", "a size such as '4MiB' or '256K'"),
        ("ZERORT_SHM_DIR", "shm", "an absolute path"),
        ("ZERORT_FLIGHT_LENGTH", "2.5", "a count above 0"),
        ("ZERORT_FLIGHT_LENGTH", "0", "a count above 0"),
        ("ZERORT_CROSS_MEMORY", "maybe", "1 or 0"),
        ("ZERORT_SOCKETS", "tcp", "auto, always or never"),
    ],
)
def test_bad_variables_are_named(clean: pytest.MonkeyPatch, name: str, text: str, expects: str) -> None:
    clean.setenv(name, text)
    with pytest.raises(CallError, match=f"^Expected {name} to be {expects}, got '{text}'. Correct or unset it."):
        GroupOptions.from_environment()


def test_bad_arguments_are_not_blamed_on_the_environment(clean: pytest.MonkeyPatch) -> None:
    with pytest.raises(CallError, match=r"^Expected timeout to be"):
        GroupOptions.from_environment(timeout=-1)
    with pytest.raises(TypeError, match="patience"):
        GroupOptions.from_environment(patience=3)


# ── budgets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_budget_reads_sizes_and_says_what_it_is() -> None:
    budget = Plan.fit(device="2GiB", host=1024, nvme="1TiB", stage=2)
    assert budget == Budget(device=2 << 30, host=1024, nvme=1 << 40, stage=2)
    assert budget.memory == (2 << 30) + 1024
    assert str(budget) == "ZeRO-2 within device 2GiB, host 1KiB, nvme 1TiB per rank"
    assert pickle.loads(pickle.dumps(budget)) == budget
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.host = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"host": "much"}, r"^Expected the budget of host as a size such as '8GiB', got 'much'\."),
        ({"host": -1}, r"^Expected the budget of host in bytes, 0 or more, got -1\."),
        ({"host": 1.5}, r"^Expected the budget of host in bytes, 0 or more, got 1\.5\."),
        ({"host": True}, r"^Expected the budget of host in bytes, 0 or more, got True\."),
        ({"nvme": "8GiB"}, r"^Expected a budget of memory to compute in, got none\. Name device=, host= or both"),
        ({"host": "8GiB", "stage": 4}, r"^Expected a ZeRO stage out of 0, 1, 2, 3; got 4\."),
        ({"host": "8GiB", "stage": True}, r"^Expected a ZeRO stage out of 0, 1, 2, 3; got True\."),
    ],
)
def test_a_budget_that_cannot_be_is_refused(budget: dict[str, Any], message: str) -> None:
    with pytest.raises((CallError, PlanError), match=message):
        Plan.fit(**budget)
