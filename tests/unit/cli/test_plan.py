"""``zerort plan``: reads a model from whatever describes it, shows what goes where, says whether it fits, and why."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import zerort as zr
from zerort.cli.main import main
from zerort.cli.plan.models import read_model
from zerort.comm import open_group
from zerort.comm.bootstrap import environment
from zerort.engine.model.tensors import TensorSpec
from zerort.engine.sizing.history import MemoryHistory, Peak, model_key
from zerort.errors import ZerortError

MIB = 1024**2


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "launched_rank", lambda: None)


@pytest.fixture
def params(tmp_path: Path) -> str:
    """Twelve blocks of 1 Mi parameters each, and a table of integers."""
    block = {"w": [1024, 1023], "b": {"shape": [1024], "dtype": "float32"}}
    path = tmp_path / "params.json"
    path.write_text(
        json.dumps({**{f"block{n}": block for n in range(12)}, "ids": {"t": {"shape": [10], "dtype": "int64"}}})
    )
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[list[str]]]:
    """Run the command; return its exit code and the words of its lines."""
    code = main(["plan", *words])
    return code, [line.split() for line in capsys.readouterr().out.splitlines()]


# ── what it says ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_fits_whole(params: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = plan(capsys, params, "--ranks", "2", "--host", "1GiB")
    assert code == 0
    assert " ".join(lines[0]).endswith("units, float32, int64; 1 of them stay as they are: no optimizer trains int64")
    assert ["parameter", "24MiB", "0B"] in lines
    assert ["gradient", "24MiB", "0B"] in lines
    assert ["state", "48MiB", "0B"] in lines
    assert ["gradient", "buckets", "8MiB"] in lines
    assert ["disk:", "nothing", "goes", "there"] in lines
    assert lines[-1] == ["fits"]


def test_float64_takes_twice_the_bytes_and_no_master_weights(params: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = plan(capsys, params, "--ranks", "2", "--host", "1GiB", "--dtype", "float64")
    assert code == 0
    assert ["parameter", "48MiB", "0B"] in lines
    assert ["gradient", "48MiB", "0B"] in lines
    assert ["state", "96MiB", "0B"] in lines
    assert main(["plan", params, "--host", "1GiB", "--dtype", "float64", "--gradient-dtype", "bfloat16"]) != 0
    told = capsys.readouterr().err
    assert "Expected gradient_dtype to be float64 or float32 for parameters of float64, got bfloat16" in told


def test_masters_as_remainders_take_half_their_bytes(
    params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state = []
    for form in ("float32", "remainder"):
        out = tmp_path / f"{form}.json"
        assert main(["plan", params, "--stage", "3", "--dtype", "bfloat16", "--master", form, "--json", str(out)]) == 0
        assert f"adamw with {form} masters" in capsys.readouterr().out
        state.append(json.loads(out.read_text())["plans"]["zero3"]["state"])
    assert state[0] / state[1] == 12 / 10
    out, words = tmp_path / "int8.json", ["--stage", "3", "--dtype", "bfloat16", "--master", "remainder"]
    assert main(["plan", params, *words, "--moments", "int8", "--json", str(out)]) == 0
    assert "adamw with remainder masters and int8 (approximate) moments" in capsys.readouterr().out
    assert 4.0 < 12 * json.loads(out.read_text())["plans"]["zero3"]["state"] / state[0] < 4.2
    assert main(["plan", params, "--optimizer", "lion", "--master", "remainder"]) == 2
    assert "Expected --master with --optimizer adamw, got lion" in capsys.readouterr().err
    assert main(["plan", params, "--master", "remainder"]) != 0
    assert "Expected parameters in bfloat16 with master='remainder'" in capsys.readouterr().err


def test_frozen_tensors_rest_as_codes(params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, words = tmp_path / "plan.json", ["plan", params, "--stage", "3", "--frozen", "w", "--frozen-format", "int4"]
    assert main([*words, "--json", str(out)]) == 0
    assert "tensors rest in int4 (approximate)" in capsys.readouterr().out
    plain = tmp_path / "plain.json"
    assert main([*words[:-2], "--json", str(plain)]) == 0
    sizes = [json.loads(one.read_text())["plans"]["zero3"]["parameter"] for one in (out, plain)]
    assert 0.128 < sizes[0] / sizes[1] < 0.13
    assert main([*words, "--device", "cuda"]) == 0
    assert "tensors rest in int4 (approximate)" in capsys.readouterr().out
    assert main([*words, "--dtype", "float64"]) == 2
    assert "can hold, got 'w' in float64" in capsys.readouterr().err
    assert main(["plan", params, "--frozen-format", "int8"]) == 0
    assert "warning: --frozen-format int8 codes nothing" in capsys.readouterr().out


def test_a_model_that_streams(params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ["--ranks", "2", "--device", "1MiB", "--host", "79MiB", "--nvme", "1GiB", "--json", str(out)]
    code, lines = plan(capsys, params, *words, "--read-speed", "2", "--write-speed", "1")
    assert code == 0
    assert lines[-1] == ["fits"]
    text = "\n".join(map(" ".join, lines))
    assert "budget: 80MiB of memory (device and host are one memory on a machine without a GPU)" in text
    assert "at 2.00 GB/s read, 1.00 GB/s written" in text
    document = json.loads(out.read_text())
    assert document["fits"]
    assert document["reason"] == ""
    assert len(document["per_rank"]) == 2
    for rank in document["per_rank"]:
        assert sum(rank["memory"].values()) <= 80 * MIB
        assert rank["nvme"]["state"] == rank["step"]["read"] == rank["step"]["written"] > 0
        assert rank["nvme"]["parameter"] == rank["nvme"]["gradient"] == 0
    moved = 2 * document["per_rank"][0]["nvme"]["state"]
    assert document["step"]["seconds"] == pytest.approx(moved / 2e9 + moved / 1e9)


def test_without_a_budget_every_plan_is_answered(
    params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plans.json"
    code, lines = plan(capsys, params, "--ranks", "2", "--json", str(out))
    assert code == 0
    #       plan     parameter gradient state  besides  all
    whole, half = "48MiB", "24MiB"
    assert ["zero0", whole, whole, "96MiB", "0B", "192MiB"] in lines
    assert ["zero1", whole, whole, "48MiB", "0B", "144MiB"] in lines
    assert ["zero2", whole, half, "48MiB", "8MiB", "128MiB"] in lines
    assert ["zero3", half, half, "48MiB", "8MiB", "104MiB"] in lines
    told = json.loads(out.read_text())["plans"]
    model = read_model(params)
    frozen = {unit: unit == "ids" for unit in model}
    for stage in range(4):
        expected = zr.forecast(model, plan=zr.Plan.zero(stage), optimizer=zr.AdamW(lr=1e-3), size=2, frozen=frozen)
        assert all(getattr(expected, part) == nbytes for part, nbytes in told[f"zero{stage}"].items()), stage
    code, lines = plan(capsys, params, "--ranks", "2", "--stage", "1")
    assert [line[0] for line in lines if line[:1] and line[0].startswith("zero")] == ["zero1"]


def test_a_second_copy_is_planned_for_where_machines_share_no_memory(
    params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plans.json"
    code, lines = plan(capsys, params, "--ranks", "4", "--machines", "2", "--micro-steps", "2", "--json", str(out))
    assert code == 0
    told, model = json.loads(out.read_text())["plans"], read_model(params)
    expected = zr.forecast(
        model,
        plan=zr.Plan.zero(3, secondary="host"),
        optimizer=zr.AdamW(lr=1e-3),
        size=4,
        frozen={unit: unit == "ids" for unit in model},
        one_memory=False,
        micro_steps=2,
    )
    assert expected.host_copy > 0 == expected.gathered
    assert all(getattr(expected, part) == nbytes for part, nbytes in told["zero3-secondary"].items())
    assert [line[0] for line in lines if line[:1] == ["zero3-secondary:"]][:1] == ["zero3-secondary:"]
    plan(capsys, params, "--ranks", "4", "--json", str(out))
    assert "zero3-secondary" not in json.loads(out.read_text())["plans"]


def test_a_gpu_for_each_rank_is_planned_for(params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plans.json"
    code, lines = plan(capsys, params, "--ranks", "3", "--device", "cuda", "--dtype", "float16", "--json", str(out))
    assert code == 0
    assert "a GPU each" in "\n".join(map(" ".join, lines))
    told = json.loads(out.read_text())["plans"]
    model = read_model(params, dtype="float16")
    settings = {"optimizer": zr.AdamW(lr=1e-3), "size": 3, "frozen": {unit: unit == "ids" for unit in model}}
    for stage in range(4):
        expected = zr.forecast(model, plan=zr.Plan.zero(stage), device="cuda", **settings)  # type: ignore[arg-type]
        assert all(getattr(expected, part) == nbytes for part, nbytes in told[f"zero{stage}"].items()), stage
        on_hosts = zr.forecast(model, plan=zr.Plan.zero(stage), **settings)  # type: ignore[arg-type]
        assert expected.gradient > 1.9 * on_hosts.gradient  # NCCL would sum float16 in float16
        assert (expected.gathered > on_hosts.gathered) == (stage == 3)  # no GPU sees another's shards


def test_a_budget_of_gpu_memory_is_apart_from_the_hosts(
    params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    words = ["--ranks", "2", "--device", "cuda", "--device", "80MiB", "--host", "100MiB", "--json", str(out)]
    code, lines = plan(capsys, params, *words)
    assert code == 0
    assert "budget: 80MiB of GPU memory, 100MiB of host memory and 0B of disk per rank" in "\n".join(
        map(" ".join, lines)
    )
    budget = zr.Plan.fit(device="80MiB", host="100MiB")
    model = read_model(params)
    frozen = {unit: unit == "ids" for unit in model}
    for rank, found in enumerate(json.loads(out.read_text())["per_rank"]):
        told = zr.forecast(
            model, plan=budget, optimizer=zr.AdamW(lr=1e-3), size=2, rank=rank, frozen=frozen, device="cuda"
        )
        assert all(getattr(told, part) == nbytes for part, nbytes in found["memory"].items())
    assert main(["plan", params, "--device", "cuda", "--device", "host"]) != 0
    assert "Expected --device once as cuda or host, and once as a size" in capsys.readouterr().err


def test_frozen_names_that_are_not_there_are_told(params: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = plan(capsys, params, "--host", "1GiB", "--frozen", "zzz*", "--frozen", "w")
    assert code == 0
    warnings = [" ".join(line) for line in lines if line[:1] == ["warning:"]]
    assert warnings == ["warning: --frozen 'zzz*' matches no tensor; names are like 'w'"]


def test_the_environment_says_how_values_stream(
    params: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [params, "--ranks", "2", "--host", "90MiB", "--nvme", "1TiB"]
    before = plan(capsys, *words)
    monkeypatch.setenv("ZERORT_OFFLOAD_CHUNK_BYTES", "8192")
    assert plan(capsys, *words) != before
    monkeypatch.setenv("ZERORT_OFFLOAD_CHUNK_BYTES", "many")
    assert main(["plan", *words]) == 2
    assert "Expected ZERORT_OFFLOAD_CHUNK_BYTES to be a size" in capsys.readouterr().err


def test_more_machines_share_the_work(params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    documents = []
    for machines in ("1", "2"):
        out = tmp_path / f"{machines}.json"
        words = ("--ranks", "4", "--machines", machines, "--host", "60MiB", "--nvme", "1GiB", "--json", str(out))
        assert plan(capsys, params, *words)[0] == 0
        documents.append(json.loads(out.read_text()))
    one, two = (document["per_rank"][0]["memory"] for document in documents)
    assert one["gathered"] == 0
    assert two["gathered"] == 2 * 4 * MIB  # two units in slots: shards of other machines are not in reach


def test_a_disk_is_measured(params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--ranks", "2", "--host", "80MiB", "--nvme", "1GiB")
    code, lines = plan(capsys, params, *words, "--scratch", str(tmp_path))
    assert code == 0
    assert any(line[:1] == ["disk:"] and "GB/s" in line for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["params.json"]
    code, lines = plan(capsys, params, *words)
    assert any("--scratch DIR measures how long that takes" in " ".join(line) for line in lines)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--host", "80MiB"],
            r"does not fit: Expected at least 104\.01MiB of memory per rank, with nothing on a disk: ",
        ),
        (["--host", "10MiB", "--nvme", "1TiB"], "does not fit: Expected at least .* of memory per rank, whatever"),
        (
            ["--host", "90MiB", "--nvme", "1TiB", "--stage", "0"],
            "does not fit: Expected at least .* what stays in memory 192MiB",
        ),
    ],
)
def test_what_does_not_fit_says_why(
    params: str, words: list[str], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    code, lines = plan(capsys, params, "--ranks", "2", *words, "--json", str(out))
    assert code == 1
    assert re.match(reason, " ".join(lines[-1]))
    assert not json.loads(out.read_text())["fits"]


def test_a_disk_without_room_is_named(params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    path.write_text(json.dumps({f"block{n}": {"w": [1024, 1024, 256]} for n in range(500)}))
    words = ("--ranks", "2", "--host", "9GiB", "--nvme", "100TiB", "--scratch", str(tmp_path))
    code, lines = plan(capsys, str(path), *words)
    assert code == 1
    assert re.match(rf"does not fit: 2 ranks would put \S+ into {tmp_path}, which has \S+ free\.", " ".join(lines[-1]))


# ── what it reads ───────────────────────────────────────────────────────────────────────────────────────────────────

W = TensorSpec((3, 4), "bfloat16")


def test_a_parameter_list_by_unit_or_by_name(tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text('{"embed": {"table": [5, 2]}, "block.0": {"w": {"shape": [3, 4], "dtype": "bfloat16"}}}')
    assert read_model(str(path)) == {"embed": {"table": TensorSpec((5, 2))}, "block.0": {"w": W}}
    path.write_text('{"layers.0.w": [3, 4], "layers.0.n.b": [4], "norm.g": [], "scale": [1]}')
    assert read_model(str(path), dtype="bfloat16") == {
        "layers.0": {"w": W, "n.b": TensorSpec((4,), "bfloat16")},
        "norm": {"g": TensorSpec((), "bfloat16")},
        "": {"scale": TensorSpec((1,), "bfloat16")},
    }


def test_the_head_of_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {"model.layers.0.w": np.zeros((3, 4), np.float16), "model.ids": np.zeros(5, np.int64)}
    save_file(arrays, path, metadata={"made": "here"})
    expected = {"model.layers.0": {"w": TensorSpec((3, 4), "float16")}, "model": {"ids": TensorSpec((5,), "int64")}}
    assert read_model(str(path)) == expected
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(arrays, path.name)}))
    assert read_model(str(index)) == expected
    with path.open("r+b") as file:  # all but the head is never looked at
        file.truncate(8 + struct.unpack("<Q", file.read(8))[0])
    assert read_model(str(path)) == expected
    assert read_model(str(path), dtype="bfloat16")["model"]["ids"].dtype == "int64"


def test_a_checkpoint(tmp_path: Path) -> None:
    with open_group(kind="solo") as group, zr.open(group=group) as rt:
        rt.register("block0", {"w": W})
        rt.save(tmp_path / "c")
    assert read_model(str(tmp_path / "c"), dtype="bfloat16") == {"block0": {"w": W}}


def test_a_checkpoint_of_codes_is_the_model_that_they_are_decoded_to(tmp_path: Path) -> None:
    with open_group(kind="solo") as group, zr.open(group=group, frozen_format="int8") as rt:
        rt.register("block0", {"w": W, "base": W}, frozen="base")
        rt.save(tmp_path / "c")
    assert read_model(str(tmp_path / "c"), dtype="bfloat16") == {"block0": {"w": W, "base": W}}


def test_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import numpy as np, zerort as zr\n"
    code += "def units():\n    c = (np.int64(7),)\n"
    code += "    return {'a': {'w': np.zeros((3, 4), 'float16'), 'b': zr.TensorSpec((2,)), 'c': c}}\n"
    code += "def broken():\n    raise OSError('no such luck')\n"
    (tmp_path / "zerort_test_model.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert read_model("zerort_test_model:units") == {
        "a": {"w": TensorSpec((3, 4), "float16"), "b": TensorSpec((2,)), "c": TensorSpec((7,))}
    }
    assert main(["plan", "zerort_test_model:broken", "--host", "1GiB"]) == 2
    assert "Expected zerort_test_model:broken to return a model, got OSError: no such luck" in capsys.readouterr().err
    assert main(["plan", "zerort_test_model:none", "--host", "1GiB"]) == 2
    assert "got AttributeError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("p.json", "{", "to hold JSON, got something else"),
        ("p.json", "[1, 2]", "Expected tensors by name, or by unit and name"),
        ("p.json", "{}", "Expected a model with tensors, got none in"),
        ("p.json", '{"a": {}}', "Expected a model with tensors, got none in"),
        (
            "p.json",
            '{"a": {"w": {"shape": [1], "size": 3}}}',
            "and 'dtype' for 'a.w', got the key 'size'",
        ),
        ("p.json", '{"a": {"w": {"dtype": "float32"}}}', "Expected 'shape' and 'dtype' for 'a.w', got no shape"),
        ("p.json", '{"w": [1, -2]}', "Expected the shape of 'w' as a list of whole numbers, got [1, -2]"),
        ("p.json", '{"w": {"shape": [1], "dtype": "float99"}}', "Expected a dtype such as float32, bfloat16, float16"),
        ("p.json", '{"weight_map": {"w": "lost.safetensors"}}', "names beside it, got no 'lost.safetensors'"),
        ("m.safetensors", "short", "to begin with the length of its head, as safetensors do; got 0"),
        ("m.safetensors", "\x02" + "\0" * 7 + "[]", "to be a JSON object, got list"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    name: str, content: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["plan", str(tmp_path / name), "--host", "1GiB"]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere.json", "--host", "1GiB"], "got 'nowhere.json', which is not there"),
        ([".", "--host", "1GiB"], "Expected a checkpoint"),
        (["PARAMS", "--nvme", "1TiB"], "Expected a budget of memory to compute in, got none."),
        (["PARAMS", "--host", "1GiB", "--read-speed", "2"], "Expected --read-speed and --write-speed together"),
        (["PARAMS", "--host", "1GiB", "--ranks", "3", "--machines", "2"], "Expected --ranks to be a multiple of"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str],
    complaint: str,
    params: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *(params if word == "PARAMS" else word for word in words)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--host", "much"], "argument --host: Expected a size such as 8GiB, got 'much'."),
        (["--read-speed", "-1"], "argument --read-speed: Expected a speed in GB/s above 0 such as 2.5, got '-1'."),
        (["--stage", "4"], "argument --stage: invalid choice"),
        (["--optimizer", "best"], "argument --optimizer: invalid choice: 'best'"),
    ],
)
def test_options_that_cannot_be_read(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "params.json", *words])
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_history_adds_what_whole_steps_take(params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    facts = {"model": model_key(read_model(params)), "memory": "host", "plan": "p", "ranks": 2, "idle": 0}
    history, out = tmp_path / "peaks.jsonl", tmp_path / "plans.json"
    for batch in (4, 8):
        peak = Peak(**facts, batch=float(batch), layout=144 * MIB, besides=(100 + 10 * batch) * MIB)
        MemoryHistory(str(history)).add(peak, write=True)
    words = [params, "--ranks", "2", "--history", str(history), "--batch", "16", "--json", str(out)]
    code, lines = plan(capsys, *words)
    assert code == 0
    #       plan     laid out  at least  likely  at most: a twentieth of 260; and of another layout
    assert ["zero1", "144MiB", "391MiB", "404MiB", "417MiB"] in lines
    assert ["zero3", "104MiB", "328.8MiB", "364MiB", "399.2MiB"] in lines
    found = json.loads(out.read_text())["predicted"]
    assert {name: one["likely"] // MIB for name, one in found.items()} == {
        "zero0": 452,
        "zero1": 404,
        "zero2": 388,
        "zero3": 364,
    }
    code, lines = plan(capsys, params, "--ranks", "2", "--host", "1GiB", "--history", str(history))
    assert ["budget", "104MiB", "256.8MiB", "284MiB", "311.2MiB"] in lines  # of as many samples as there were at most
    assert main(["plan", params, "--ranks", "2", "--host", "1KiB", "--history", str(history)]) == 1
    shown = capsys.readouterr().out
    assert "no step is predicted" in shown
    assert "samples at once" not in shown  # a table without a row


def test_a_batch_size_needs_a_history_that_knows_some(
    params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", params, "--batch", "16"]) == 2
    assert "Expected --batch with --history" in capsys.readouterr().err
    history = str(tmp_path / "peaks.jsonl")
    facts = {"model": model_key(read_model(params)), "memory": "host", "plan": "p", "ranks": 2, "idle": 0}
    MemoryHistory(history).add(Peak(**facts, batch=0.0, layout=144 * MIB, besides=100 * MIB), write=True)
    assert main(["plan", params, "--history", history, "--batch", "16"]) == 2
    assert "Expected steps of a known batch size" in capsys.readouterr().err
    assert main(["plan", params, "--history", history]) == 0


def test_a_history_of_another_model_is_refused(params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", params, "--history", str(tmp_path / "none")]) == 2
    assert "Expected steps of this model in" in capsys.readouterr().err
    assert main(["plan", params, "--history", params]) == 2
    assert "Expected the peak of a step as JSON" in capsys.readouterr().err


@pytest.mark.parametrize("accumulate", [None, "sharded", "local"])
def test_accumulated_gradients_are_counted_as_a_runtime_holds_them(
    accumulate: str | None, params: str, tmp_path: Path
) -> None:
    words = ["--micro-steps", "4", "--ranks", "2", "--json", str(tmp_path / "plan.json")]
    assert main(["plan", params, *words, *(() if accumulate is None else ("--accumulate", accumulate))]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())["plans"]
    whole = 12 * 1024 * 1024 * 4
    for stage, each in ((0, whole), (1, whole), (2, whole // 2), (3, whole // 2)):
        assert found[f"zero{stage}"]["gradient"] == (whole if accumulate == "local" else each), stage


def test_a_fixed_tree_is_counted_as_a_runtime_holds_it(params: str, tmp_path: Path) -> None:
    words = ["plan", params, "--virtual-shards", "5", "--json", str(tmp_path / "plan.json"), "--ranks"]
    assert main([*words, "2"]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())["plans"]
    whole = 12 * 1024 * 1024 * 4
    assert found["zero1"]["gradient"] == 3 * whole  # what is being added, and two that a rank sums
    assert found["zero3"]["gradient"] == whole // 2  # a shard: two leaves, four, all
    assert main([*words, "8"]) == 2


def test_ties_and_how_micro_steps_are_summed_are_named(
    params: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = (params, "--ranks", "2", "--micro-steps", "4")
    _, lines = plan(capsys, *words)
    text = [" ".join(line) for line in lines]
    assert "zero1: 4 micro-steps accumulated local, in whole gradients" in text
    assert "zero3: 4 micro-steps accumulated sharded" in text
    _, lines = plan(capsys, *words, "--stage", "3", "--accumulate", "local")
    assert "ZeRO-3, 4 micro-steps accumulated local, in whole gradients on 2 ranks" in " ".join(lines[1])
    out = tmp_path / "plan.json"
    counted = []
    for tie in ((), ("--tie", "block3=block0.w", "--tie", "tail=block0.w")):
        code, lines = plan(capsys, *words, "--stage", "3", "--buckets", "1", "--json", str(out), *tie)
        assert code == 0
        counted.append(json.loads(out.read_text())["plans"]["zero3"])
    told_of = [" ".join(line) for line in lines if line[:4] == ["tied:", "tail", "uses", "block0.w."]]
    assert "torch's autograd sums them first, and holds 4MiB besides" in told_of[0]
    assert counted[0]["gradient"] == counted[1]["gradient"]
    specs = {f"block{n}": {"w": zr.TensorSpec((1024, 1023)), "b": zr.TensorSpec((1024,))} for n in range(12)}
    ties = {unit: {"w0": ("block0", "w")} for unit in ("block3", "tail")}
    told = zr.forecast(
        specs, plan=zr.Plan.zero(3), optimizer=zr.AdamW(lr=1.0), size=2, micro_steps=4, buckets=1, ties=ties
    )
    assert (told.buckets, told.gradient) == (counted[1]["buckets"], counted[1]["gradient"])
    assert main(["plan", params, "--tie", "tail=nope"]) == 2
    assert "Expected --tie UNIT=NAME" in capsys.readouterr().err


def test_tables_by_rows_are_counted_as_a_runtime_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"embed": {"table": [40_000, 64]}, "line": {"w": [512, 512]}}))
    out = tmp_path / "plan.json"
    words = (str(model), "--ranks", "2", "--json", str(out))
    code, lines = plan(capsys, *words, "--host", "10MiB", "--nvme", "1GiB", "--rows", "embed.table")
    assert code == 0
    assert "by rows: 2,560,000 parameters in 1 tables" in " ".join(" ".join(line) for line in lines)
    specs = {"embed": {"table": zr.TensorSpec((40_000, 64))}, "line": {"w": zr.TensorSpec((512, 512))}}
    budget = zr.Plan.fit(host="10MiB", nvme="1GiB")
    told = zr.forecast(specs, plan=budget, optimizer=zr.AdamW(lr=1.0), size=2, rows={"embed": ("table",)})
    shown = json.loads(out.read_text())["per_rank"][0]
    for part in ("parameter", "gradient", "state", "buckets", "gathered", "streaming"):
        assert shown["memory"][part] == getattr(told, part), part
    assert sum(shown["nvme"].values()) == told.nvme > 0
    _, lines = plan(capsys, *words, "--rows", "embed.table")
    assert [*json.loads(out.read_text())["plans"]] == ["zero1", "zero2", "zero3"]
    plan(capsys, *words, "--rows", "embed.table", "--machines", "2")
    assert [*json.loads(out.read_text())["plans"]] == ["zero1", "zero2", "zero3"]
    assert main(["plan", *words, "--rows", "embed"]) == 2
    assert "Expected --rows with" in capsys.readouterr().err


REFUSED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "zero0": (["--stage", "0"], {"plan": zr.Plan.zero(0)}),
    "frozen": (["--frozen", "table"], {"frozen": "table"}),
    "tied": (["--tie", "head=embed.table"], {"ties": {"head": {"embed.table": ("embed", "table")}}}),
    "adafactor": (["--optimizer", "adafactor"], {"optimizer": zr.Adafactor(lr=1e-3)}),
    "int8": (["--moments", "int8"], {"optimizer": zr.AdamW(lr=1e-3, moments="int8")}),
    "remainder": (["--master", "remainder"], {"optimizer": zr.AdamW(lr=1e-3, master="remainder")}),
    "budget": (["--host", "1GiB", "--moments", "int8"], {"optimizer": zr.AdamW(lr=1e-3, moments="int8")}),
}


@pytest.mark.parametrize(("words", "settings"), REFUSED.values(), ids=REFUSED)
def test_tables_by_rows_are_refused_in_the_words_of_a_forecast(
    words: list[str], settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"embed": {"table": [400, 64]}, "line": {"w": [512, 512]}}))
    assert main(["plan", str(model), "--ranks", "2", "--rows", "embed.table", *words]) == 2
    printed = capsys.readouterr()
    specs = {"embed": {"table": zr.TensorSpec((400, 64))}, "line": {"w": zr.TensorSpec((512, 512))}}
    told = {"plan": zr.Plan.zero(3), "optimizer": zr.AdamW(lr=1e-3), "size": 2, **settings}
    with pytest.raises(ZerortError) as caught:
        zr.forecast(specs, rows={"embed": ("table",)}, **told)
    assert (printed.out, printed.err) == ("", f"zerort: {caught.value}\n")
