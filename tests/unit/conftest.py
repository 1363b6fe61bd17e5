"""Unit tests may import what several of them share: tier_runs.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
