"""Where benches find and keep their files: in the checkout they belong to, else below the current folder."""

from __future__ import annotations

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (_CHECKOUT / "pyproject.toml").exists()
ROOT = _CHECKOUT if IS_CHECKOUT else Path.cwd()
RESULTS = ROOT / "bench" / "results" if IS_CHECKOUT else ROOT / "pdx-bench"
SCRATCH = ROOT / ".demo"  # models, logs and answers that are kept from run to run
