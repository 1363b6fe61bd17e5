"""Starts the emulator in a child process that was told to (`cusim.environment`), before its program runs."""

import os
import sys
from pathlib import Path

if os.environ.get("CUSIM") == "1":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    import cusim

    cusim.start()
