"""Makes `bench` importable without the repository root on sys.path, where `transformers` would import our `kernels`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if "bench" not in sys.modules:
    spec = importlib.machinery.ModuleSpec("bench", None, is_package=True)
    spec.submodule_search_locations = [str(ROOT / "bench")]
    sys.modules["bench"] = importlib.util.module_from_spec(spec)
