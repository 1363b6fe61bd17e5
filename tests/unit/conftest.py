"""Unit tests may import what several of them share: tier_runs.py. How busy a machine is fails no example."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("zerort", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("zerort")
