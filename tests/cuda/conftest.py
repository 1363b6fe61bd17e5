"""Tests of the GPU path: here those of one process, in `ranks` those of several (`python -m zerort.testing`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # nvrtc.py
