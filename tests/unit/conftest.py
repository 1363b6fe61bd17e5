"""Unit tests may import what several of them share, such as seams.py. How busy a machine is fails no example."""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# The same examples in every run: a new one that fails must not fail somebody else's change. `make fuzz` draws new ones.
settings.register_profile(
    "zerort",
    deadline=None,
    derandomize="ZERORT_EXECUTIONS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("zerort")
