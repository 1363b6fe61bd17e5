"""What README and docs show of GPUs runs as it stands, in either mode of `hardware`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
import doc_blocks
import hardware

pytest.importorskip("cupy")

BLOCKS = [block for block in doc_blocks.blocks() if block.language == "python" and block.needs == {"gpu"}]


def test_a_block_runs_as_it_stands(tmp_path):
    assert BLOCKS
    for block in BLOCKS:
        folder = tmp_path / str(block.line)
        reports = folder / "reports"
        reports.mkdir(parents=True)
        settings = hardware.environment(devices=max(block.ranks), report=reports)
        doc_blocks.expect_it_runs(block, folder, env=settings)
        assert hardware.findings_in(reports) == []
