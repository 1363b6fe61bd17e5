"""``zerort bench wire`` on a few values: a row for each codec, errors within their bounds, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerort.cli.bench.wire import command as bench_wire
from zerort.cli.bench.wire.link_rows import link_rows
from zerort.cli.main import main

TINY = ["bench", "wire", "--numel", "20K", "--seconds", "0.005"]


def test_every_codec_is_a_row_with_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert main([*TINY, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    rows = {row["codec"]: row for row in found["rows"]}
    assert rows["int8"]["part"] == pytest.approx(0.254, rel=0.01)
    assert rows["int4"]["part"] == pytest.approx(0.129, rel=0.01)
    assert rows["delta, 1% changed"]["part"] <= 0.016 + 0.01
    for name, row in rows.items():
        assert row["encode_ratio"] == pytest.approx(row["memcpy_ms"] / row["encode_ms"])
        assert row["decode_ratio"] == pytest.approx(row["memcpy_ms"] / row["decode_ms"])
        assert row["error"] <= 1.0
        assert (row["error"] == 0) == name.startswith(("delta", "byte"))
    assert [row["lr"] for row in found["shares"]] == [1e-6, 1e-5, 3e-4]
    assert 0 < found["shares"][0]["changed"] < found["shares"][1]["changed"] < found["shares"][2]["changed"] < 1
    assert all(row["part"] <= row["bound"] for row in found["shares"])
    out = capsys.readouterr().out
    assert all(name in out for name in rows)
    assert "wrong values: 0" in out


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_wire, "available_nbytes", lambda: 1000)
    assert main(TINY) == 1
    assert "--numel: Expected 1.22MiB of memory, got 1000B available" in capsys.readouterr().err


def test_what_a_link_exposes_is_counted_from_the_uncoded_step_without_a_limit() -> None:
    def steps(uncoded: float, coded: float) -> list[dict[str, object]]:
        times = {"uncoded": uncoded, "coded": coded, "floor": 80.0}
        return [{"plan": name, "step_ms": ms, "moved_nbytes": 4} for name, ms in times.items()]

    free, slow = link_rows([(None, steps(100.0, 110.0)), ("200mbit", steps(400.0, 150.0))])
    assert (free.uncoded_exposed_ms, free.coded_exposed_ms) == (0.0, 10.0)
    assert (slow.uncoded_exposed_ms, slow.coded_exposed_ms) == (300.0, 50.0)
    assert slow.as_json()["coded_exposed_ms"] == 50.0


@pytest.mark.parametrize("rates", ["fast", "1gbit,", "0mbit"])
def test_rates_that_are_none_are_refused(rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*TINY, "--step", "--rates", rates])
    assert "Expected a rate such as 1gbit or 500mbit" in capsys.readouterr().err
