"""``kill -9`` of a publisher or a reader leaves whole versions; `make publish-kills` does it at every operation."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("publish_kills.py")


def test_every_version_is_whole_whoever_is_killed(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "7"], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    writes, reads, moments = map(int, re.findall(r"\d+", done.stdout))
    assert writes >= 10
    assert reads >= 3
    assert moments >= 3
