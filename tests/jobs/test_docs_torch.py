"""What README and docs show of torch runs as it stands, and torch programs take the words that they are given."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import doc_blocks

pytest.importorskip("torch")
zt = pytest.importorskip("zerort_torch")

BLOCKS = [block for block in doc_blocks.blocks() if block.language == "python" and block.needs == {"torch"}]


def test_there_are_some() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_as_it_stands(block: doc_blocks.Block, tmp_path: Path) -> None:
    doc_blocks.expect_it_runs(block, tmp_path)


def test_programs_take_the_words_that_they_are_given() -> None:
    ours = {words for words in map(doc_blocks.program, doc_blocks.commands()) if doc_blocks.is_ours(words)}
    here = sorted(words for words in ours if doc_blocks.needs_torch(words))
    assert len(here) >= 4
    assert doc_blocks.complaints(here) == []


def test_every_name_of_the_binding_that_is_named_is_there() -> None:
    named = {name for file in doc_blocks.FILES for name in re.findall(r"\bzt\.(\w+)", file.read_text())}
    assert {"shard", "gathered", "optimizer"} <= named
    for name in named:
        assert hasattr(zt, name), name
