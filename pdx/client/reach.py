"""How a controller reaches nodes: what a way to them must do. `local_nodes` and `proxy_http` are the two ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdx import errors
from pdx.errors import NodeError, PdxError, ProxyError
from pdx.wire.messages import Outcome
from pdx.wire.prompt import Prompt
from pdx.wire.verbs import AnyVerb

_NOT_BY_NAME = frozenset({"RequestRefused", "LegFailed", "TierError", "Exhausted", "VerbRefused", "PdxError"})


class Reach(Protocol):
    """Nodes by their names. Each method may wait as long as its nodes may; all raise what `pdx.errors` says."""

    def names(self) -> list[str]:
        """The nodes there are."""

    def address(self, name: str) -> str:
        """Where this node is reached from here; empty: through a proxy."""

    def ask(self, verb: AnyVerb, instances: Sequence[str], prompt: Prompt | None = None) -> dict[str, Outcome]:
        """What came of a verb at each of these nodes, of none: at all; its chunks, if it has any, are the prompt's.

        A node that refuses, or does not answer, has a `Refused`; where it is the only one, that is raised.
        """

    def close(self) -> None:
        """Let go of the nodes. Idempotent."""


def error_of(name: str, text: str) -> PdxError:
    """The error that was told by the name of its class; what is no such name, or has a constructor of its own, is a
    `NodeError`, or a `ProxyError`."""
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, PdxError):
        return NodeError(f"{name}: {text}")
    if name in _NOT_BY_NAME:
        return ProxyError(text)
    return kind(text)
