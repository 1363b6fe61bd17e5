"""Starts the emulator in a child process that was told to (`cusim.environment`), before its program runs.

Python takes one module of this name, the first on the path; so the next one is run from here.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent

if os.environ.get("CUSIM") == "1":
    sys.path.append(str(HERE.parents[1]))
    import cusim

    cusim.start()

_spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if Path(entry).resolve() != HERE])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
