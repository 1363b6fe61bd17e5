"""``zerort ckpt``: what a checkpoint holds, whether it is whole, its tensors as safetensors; wrong words are a line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from zerort.checkpoint import Value, read_manifest, save
from zerort.cli.main import main
from zerort.comm.bootstrap import environment
from zerort.layout import FlatLayout, Partition
from zerort.testing import run_threads


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "launched_rank", lambda: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    layout = FlatLayout.build({"block0.w": (100, 30), "scale": ()})

    def body(group):
        partition = Partition.build(layout.numel, group.size)
        mine = np.ones(partition.counts[group.rank], np.float32)
        values = [Value(kind=kind, layout=layout, partition=partition, mine=mine) for kind in ("parameter", "exp_avg")]
        meta = {"loss_scale": 65536.0, "updates": 120, "plan": "ZeRO-3", "optimizer": {"name": "adamw", "lr": 1e-3}}
        save(tmp_path / "c", group, values, meta=meta, progress={"epoch": group.rank})

    run_threads(3, body)
    return tmp_path / "c"


def test_inspect_shows_what_it_holds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "inspect", str(path)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["checkpoint", str(path)] in lines
    assert ["updates", "120"] in lines
    assert ["plan", "ZeRO-3"] in lines
    assert ["optimizer", '{"name":', '"adamw",', '"lr":', "0.001}"] in lines
    assert ["loss_scale", "65536.0"] in lines
    assert ["ranks", "3"] in lines
    assert ["parameter", "2", "3001", "float32", "11.72KiB"] in lines
    assert ["all", "4", "6002", "23.45KiB"] in lines
    assert "block0.w" not in out
    assert main(["ckpt", "inspect", str(path), "--tensors"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["exp_avg", "block0.w", "float32", "(100,", "30)", "11.72KiB", "3"] in lines
    assert ["exp_avg", "scale", "float32", "()", "4B", "1"] in lines


def test_inspect_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "inspect", str(path), "--json", "--tensors"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["meta"]["updates"] == 120
    assert document["progress"] == [{"epoch": 0}, {"epoch": 1}, {"epoch": 2}]
    assert document["kinds"]["exp_avg"]["nbytes"] == 12004
    assert document["kinds"]["parameter"]["names"]["block0.w"]["shape"] == [100, 30]
    assert len(document["files"]) == document["ranks"] == 3


def test_verify_says_ok_or_lists_the_damage(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: ok: 8 extents in 3 files, 23.45KiB in ")
    manifest = read_manifest(path)
    extent = manifest.tensors["exp_avg"]["block0.w"].extents[1]
    name = manifest.files[extent.file].name
    with (path / name).open("r+b") as file:
        file.seek(extent.offset + 5)
        file.write(b"!")
    assert main(["ckpt", "verify", str(path)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(
        f"{name}: exp_avg 'block0.w': {extent.numel * 4} bytes from offset {extent.offset}: Expected"
    )
    assert last == f"{path}: DAMAGED: 1 of 8 extents, in 1 of 3 files. Load another checkpoint."
    (path / name).unlink()
    assert main(["ckpt", "verify", str(path)]) == 1
    assert "got none." in capsys.readouterr().out


def test_export_writes_safetensors(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.safetensors"
    assert main(["ckpt", "export", str(path), str(out), "--dtype", "bfloat16", "--kind", "exp_avg"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 2 tensors of kind 'exp_avg', ")
    assert str(load_file(out)["block0.w"].dtype) == "bfloat16"
    assert main(["ckpt", "export", str(path), str(out)]) == 2
    assert "or say --force" in capsys.readouterr().err
    assert main(["ckpt", "export", str(path), str(out), "--force"]) == 0
    assert str(load_file(out)["block0.w"].dtype) == "float32"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["inspect", "{dir}/none"], "Expected a checkpoint at {dir}/none, got nothing. Name the directory"),
        (["inspect", "{dir}"], "got a directory of 1 entries without manifest.json"),
        (["inspect", "{dir}/c/manifest.json"], "got a file. Name the directory that holds manifest.json."),
        (["verify", "{dir}/none"], "got nothing."),
        (["export", "{dir}/none", "{dir}/o"], "got nothing."),
        (["export", "{dir}/c", "{dir}/o", "--kind", "momentum"], "Expected a kind out of parameter, exp_avg, got"),
        (["export", "{dir}/c", "{dir}/o", "--dtype", "int8"], "Expected dtype to be one of float16, bfloat16,"),
    ],
)
def test_wrong_words_are_one_line_and_code_2(
    path: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", *(word.format(dir=path.parent) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("zerort: ")
    assert error.count("\n") == 1
    assert text.format(dir=path.parent) in error


def test_a_damaged_manifest_is_code_1(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"updates":120', '"updates":121'))
    for verb in ("inspect", "verify"):
        assert main(["ckpt", verb, str(path)]) == 1
        assert "the manifest is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ckpt", "inspect"], "required: PATH"),
        (["ckpt", "export", "c", "/no/such/dir/o"], "Expected a file in a directory that can be written to"),
        (["bench", "checkpoint", "--nbytes", "10"], "Expected a size of at least 1MiB such as 1GiB, got '10'"),
        (["bench", "checkpoint", "--nbytes", "1G,2G"], "Expected a size of at least 1MiB such as 1GiB"),
        (["bench", "checkpoint", "--dir", "/no/such"], "Expected a directory that can be written to, got '/no/such'"),
        (["bench", "checkpoint", "--rounds", "0"], "Expected a number of rounds from 1 to 1000"),
    ],
)
def test_wrong_words_are_usage_errors(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_help_at_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["ckpt"], ["ckpt", "inspect"], ["ckpt", "verify"], ["ckpt", "export"], ["bench", "checkpoint"]):
        with pytest.raises(SystemExit) as end:
            main([*words, "--help"])
        assert end.value.code == 0
        assert "examples:" in capsys.readouterr().out or words == ["ckpt"]
