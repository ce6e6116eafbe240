"""A run of `pdx bench store`: every tier with every size of chunks, then the index; what is missing, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pdx.bench.harness.interrupts import Steps
from pdx.bench.harness.report import Figure, plain
from pdx.bench.store import tiers
from pdx.bench.store import tiers as lookups
from pdx.bench.store.engine_memory import Load
from pdx.bench.store.tiers import IndexRow, Row
from pdx.cli.tables import size
from pdx.errors import ConfigError, PdxError


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured."""

    tiers: tuple[str, ...]
    sizes: tuple[int, ...]
    chunks: int
    rounds: int
    index: tuple[int, ...]
    questions: int

    def loads(self) -> list[Load]:
        """:raises ConfigError: a size is no multiple of 4 KiB."""
        return [Load(size, self.chunks, self.rounds) for size in self.sizes]


@dataclass(slots=True)
class StoreRun:
    """What was measured so far. `on_more` is called whenever that has become more."""

    settings: Settings
    on_more: Callable[[], object] = lambda: None
    rows: list[Row] = field(default_factory=list)
    index: list[IndexRow] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    is_complete: bool = False

    def begin(self) -> None:
        """Find out what is missing.

        :raises ConfigError: a tier or a size that cannot be.
        """
        self.settings.loads()
        known = tiers.all_tiers()
        for name in self.settings.tiers:
            if name not in known:
                raise ConfigError(f"no tier is named {name!r}; there are {', '.join(known)}")
            if why := tiers.why_missing(name):
                self.missing[name] = why

    @property
    def steps(self) -> int:
        """How many there are, after `begin`."""
        present = len(self.settings.tiers) - len(self.missing)
        return present * len(self.settings.sizes) + len(self.settings.index)

    def measure(self, steps: Steps) -> None:
        """Take all steps. A tier that turns out not to work is missing, and the others go on."""
        for name in self.settings.tiers:
            if name not in self.missing:
                self._tier(name, steps)
        for chunks in self.settings.index:
            steps.step(f"index of {chunks:,} chunks")
            try:
                self.index.append(lookups.measure_index(chunks, self.settings.questions))
            except (PdxError, RuntimeError, OSError) as error:
                self._miss(f"index of {chunks:,} chunks", error, steps)
            self.on_more()
        self.is_complete = True
        self.on_more()

    def _tier(self, name: str, steps: Steps) -> None:
        for number, load in enumerate(self.settings.loads()):
            steps.step(f"{tiers.title(name)}, chunks of {size(load.chunk_bytes)}")
            try:
                self.rows.append(tiers.measure_tier(name, load))
            except (PdxError, RuntimeError, OSError) as error:
                self._miss(name, error, steps)
                steps.skip(len(self.settings.sizes) - number - 1)
                return
            self.on_more()

    def _miss(self, name: str, error: Exception, steps: Steps) -> None:
        self.missing[name] = f"{type(error).__name__}: {error}"
        steps.say(f"not measured: {name}: {error}")

    def figures(self) -> list[Figure]:
        """The numbers, by name."""
        found: list[Figure] = []
        for row in self.rows:
            name = f"{tiers.title(row.tier)}, chunks of {size(row.chunk_bytes)}"
            found += [
                plain(f"{name}: write", row.write_gb_s, "GB/s", f"{row.write_ratio:.3f} of memcpy"),
                plain(f"{name}: read", row.read_gb_s, "GB/s", f"{row.read_ratio:.3f} of memcpy"),
                plain(f"{name}: store one, p50", row.store.p50_ms, "ms", f"p99 {row.store.p99_ms:.3f}"),
                plain(f"{name}: find one, p50", row.hit.p50_ms, "ms", f"p99 {row.hit.p99_ms:.3f}"),
            ]
        for each in self.index:
            name = f"index of {each.chunks:,} chunks"
            found += [
                plain(f"{name}: lookups", each.lookups_per_s, "1/s", "one client, one after the other"),
                plain(f"{name}: hit, p50", each.hit.p50_ms, "ms", f"p99 {each.hit.p99_ms:.3f}"),
                plain(f"{name}: prompt of {lookups.PROMPT_KEYS} chunks, p50", each.prompt.p50_ms, "ms"),
            ]
        return found

    def details(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "settings": asdict(self.settings),
            "rows": [asdict(row) for row in self.rows],
            "index": [asdict(each) for each in self.index],
            "missing": self.missing,
            "is_complete": self.is_complete,
        }

    @property
    def has_nothing(self) -> bool:
        """Whether nothing at all was measured."""
        return not self.rows and not self.index


def default_tiers() -> Sequence[str]:
    """All of them: what is missing here shall be named."""
    return tiers.all_tiers()
