"""The command line says what is wrong with it in one line; help and version are there at every level."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from zerort.cli import arguments, ranks
from zerort.cli.bench import harness, pictures
from zerort.cli.main import main
from zerort.comm.bootstrap import environment
from zerort.errors import BootstrapError

K, M = 1024, 1024**2


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4K", (4 * K,)),
        ("64K,1M", (64 * K, M)),
        ("4K..256M", tuple(4 * K * 4**i for i in range(9))),
        ("1K..10K", (K, 4 * K)),
        ("4K,4K..16K", (4 * K, 16 * K)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert arguments.parse_sizes(text) == sizes


@pytest.mark.parametrize(("text", "numel"), [("50M", 50_000_000), ("1.5K", 1500), ("7", 7), ("1g", 10**9)])
def test_numbers_of_elements(text: str, numel: int) -> None:
    assert arguments.parse_numel(text) == numel


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["bench", "collectives", "--ops", "all_gather,nope"], "--ops: Expected names out of all_gather, .*got 'nope'"),
        (["bench", "collectives", "--dtypes", "float31"], "--dtypes: Expected names out of float32"),
        (["bench", "collectives", "--sizes", "4Q"], "--sizes: Expected sizes such as 64K,1M or 4K..256M"),
        (["bench", "collectives", "--sizes", "0"], "--sizes: Expected sizes of at least 1 byte"),
        (["bench", "collectives", "--sizes", "1M..4K"], "--sizes: Expected sizes of at least 1 byte, from small"),
        (["bench", "collectives", "--sizes", "1M.."], "--sizes: Expected sizes such as"),
        (["bench", "collectives", "--ranks", "0"], "--ranks: Expected a number of ranks of at least 1, got '0'"),
        (["bench", "collectives", "--seconds", "-1"], "--seconds: Expected seconds above 0"),
        (["bench", "collectives", "--json", "/no/such/dir/f"], "--json: Expected a file in a directory that can"),
        (["bench", "collectives", "--json", "/"], "--json: Expected a file in a directory that can"),
        (["bench", "collectives", "--kind", "threads"], "--kind: invalid choice: 'threads'"),
        (["bench", "optimizer", "--numel", "0"], "--numel: Expected a number of elements such as 50M"),
        (["bench", "optimizer", "--numel", "0.5"], "--numel: Expected a number of elements such as 50M"),
        (["bench", "step", "--plans", "zero4"], "--plans: Expected names out of zero0, .*got 'zero4'"),
        (
            ["bench", "step", "--width", "6"],
            "--width: Expected a whole number of at least 4 and a multiple of 4, got '6'",
        ),
        (["bench", "step", "--layers", "0"], "--layers: Expected a whole number of at least 1, got '0'"),
        (["bench", "step", "--rounds", "x"], "--rounds: Expected a whole number of at least 1, got 'x'"),
        (["bench", "step", "--prefetch", "-1"], "--prefetch: Expected a whole number of at least 0, got '-1'"),
        (["bench", "step", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["bench", "step", "--trace", "/no/such/dir/f"], "--trace: Expected a file in a directory that can"),
        (["docter"], "invalid choice: 'docter'"),
    ],
)
def test_wrong_words_are_usage_errors(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]

    assert re.search(line, last), last


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "bench"),
        (["doctor"], "DIR"),
        (["bench"], "collectives"),
        (["bench"], "a training step under each plan"),
        (["bench", "collectives"], "4K 16K 64K 256K 1M 4M 16M 64M 256M"),
        (["bench", "optimizer"], "--compare"),
        (["bench", "step"], "--micro-steps"),
    ],
)
def test_help_at_every_level(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*words, "--help"])
    assert end.value.code == 0
    assert text in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("words", "text"), [([], "doctor"), (["bench"], "collectives"), (["ckpt"], "inspect")])
def test_a_command_alone_prints_help(words: list[str], text: str) -> None:
    done = subprocess.run([sys.executable, "-m", "zerort", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: zerort")
    assert text in done.stdout


def test_python_m_zerort_says_its_version() -> None:
    answer = subprocess.run([sys.executable, "-m", "zerort", "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.split()[0] == "zerort"


def test_help_loads_neither_mpi_nor_rich() -> None:
    code = "import sys, zerort.cli.main as m; m.build_parser(); print([n for n in sys.modules if n in {names}])"
    names = "('mpi4py.MPI', 'rich', 'matplotlib', 'torch')"
    answer = subprocess.run(
        [sys.executable, "-c", code.format(names=names)], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "launched_size", lambda: None)
    monkeypatch.setattr(environment, "launched_rank", lambda: None)


@pytest.mark.usefixtures("no_job")
def test_a_missing_launcher_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> None:
        raise BootstrapError("Expected an mpirun, got none.")

    monkeypatch.setattr(ranks, "find_launcher", none)
    assert main(["bench", "collectives"]) == 1
    assert capsys.readouterr().err == "zerort: Expected an mpirun, got none.\n"


@pytest.mark.usefixtures("no_job")
def test_a_plot_needs_matplotlib_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(harness, "run_ranks", lambda *words, **options: pytest.fail("ranks were started"))
    assert main(["bench", "collectives", "--plot", f"{tmp_path}/f.png"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
