"""What is installed, as tests want it, and what a typed command holds."""

import json
import shlex

from pdx.bench.systems import baselines, system


def packages(monkeypatch, **versions):
    """Exactly these distributions are installed."""
    versions = {name.replace("_", "-"): version for name, version in versions.items()}
    for module in (system, baselines):
        monkeypatch.setattr(module, "installed", lambda name: versions.get(name, ""))


def config_of(line):
    words = shlex.split(line)
    return json.loads(words[words.index("--kv-transfer-config") + 1])
