"""How many examples properties are tried with: some, the same each time, by `make test`; all, and others each time, by
`make test-long` (`--part=long`), which also runs the properties that `make test` has run."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

# Cores are shared and stall for seconds: how long an example took says nothing.
_ALWAYS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("some", max_examples=33, derandomize=True, **_ALWAYS)
settings.register_profile("all", derandomize=False, **_ALWAYS)  # which CI=1 would leave out
settings.load_profile("some")


def examples(count: int) -> int:
    """The number of examples of a property that is tried with `count` where all are."""
    return count // 3 if settings.get_current_profile_name() == "some" else count
