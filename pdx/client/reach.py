"""How a controller reaches nodes: what a way to them must do. `local_nodes` and `proxy_http` are the two ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pdx import errors
from pdx.client.prompt import Health, Lookup, Prompt
from pdx.errors import NodeError, PdxError, ProxyError, SelectionError
from pdx.wire.messages import Outcome, Verb

_NOT_BY_NAME = frozenset({"RequestRefused", "LegFailed", "TierError", "Exhausted", "VerbRefused", "PdxError"})


class Reach(Protocol):
    """Nodes by their names. Each method may wait as long as its nodes may; all raise what `pdx.errors` says."""

    def names(self) -> list[str]:
        """The nodes there are."""

    def find(self, prompt: Prompt, instances: Sequence[str], wait_s: float) -> Lookup:
        """Where a prompt's chunks are; tiers that have to ask elsewhere have `wait_s` for it."""

    def addresses(self, instances: Sequence[str]) -> dict[str, str]:
        """Where nodes are."""

    def health(self, instances: Sequence[str]) -> dict[str, Health]:
        """How nodes are."""

    def ask(self, verb: Verb, instances: Sequence[str], prompt: Prompt | None = None) -> dict[str, Outcome]:
        """What came of a verb at each of these nodes; its selection, if it has one, is that of the prompt.

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


def named(instances: Sequence[str], known: Mapping[str, object] | Sequence[str]) -> list[str]:
    """These nodes, each once; all that are known where none is named.

    :raises SelectionError: one is not known.
    """
    for name in instances:
        if name not in known:
            raise SelectionError(f"no node {name!r:.80} is known here; there are {', '.join(known) or 'none'}")
    return list(dict.fromkeys(instances or known))
