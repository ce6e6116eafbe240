"""The nodes that controllers name: what each has last said of itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from pdx.errors import NodeUnavailable, SelectionError
from pdx.proxy.control import Control
from pdx.proxy.engines import MAX_NODES
from pdx.telemetry.env import Env
from pdx.wire.proxy import NodeReport
from pdx.wire.verbs import Model

FORGET_S = 3600.0  # a node without a roster that was silent for so long is forgotten
_NAMED = 16  # names in an error's text …


class Instance(msgspec.Struct, frozen=True):
    """A node as it was when it was last heard of. `report` is None: the roster names it, and it has not reported."""

    name: str
    report: NodeReport | None
    seen_at: float


class Instances:
    """All calls on one thread. At most MAX_NODES are known."""

    def __init__(self, control: Control, env: Env, *, silent_s: float) -> None:
        self._control = control
        self._silent_s = silent_s
        self._clock = env.clock
        self._seen: dict[str, Instance] = {}

    def report(self, report: NodeReport) -> bool:
        """Take in a node's word; True: it is another life of a node that was known."""
        before = self._seen.pop(report.node, None)
        if before is None and len(self._seen) >= MAX_NODES:
            self._expire()
        if before is not None or len(self._seen) < MAX_NODES:
            kept = msgspec.structs.replace(report, marks=[])
            self._seen[report.node] = Instance(report.node, kept, self._clock())
        return before is not None and before.report is not None and before.report.epoch != report.epoch

    def all(self) -> dict[str, Instance]:
        """By name: those that have reported, and those that the roster names."""
        members = self._control.members()
        if members is None:
            self._expire()
            return dict(sorted(self._seen.items()))
        return {name: self._seen.get(name) or Instance(name, None, 0.0) for name in sorted(members)}

    def _expire(self) -> None:
        oldest = self._clock() - FORGET_S
        self._seen = {name: each for name, each in self._seen.items() if each.seen_at >= oldest}

    def named(self, names: Collection[str]) -> dict[str, Instance]:
        """Those of these names; of none: all. :raises SelectionError: one is not known."""
        known = self.all()
        for name in names:
            if name not in known:
                raise _unknown(name, known)
        return {name: known[name] for name in names} if names else known

    def get(self, name: str) -> Instance:
        """The one of this name. :raises SelectionError: there is none."""
        return self.named([name])[name]

    def check_heard(self, instance: Instance) -> None:
        """:raises NodeUnavailable: it has not been heard of lately."""
        if problem := self.problem(instance):
            raise NodeUnavailable(f"node {instance.name!r} {problem}")

    def problem(self, instance: Instance) -> str:
        """Why it cannot be told anything, empty: it can."""
        if instance.report is None:
            return "is in the roster, and has not reported to this proxy"
        age_s = self._clock() - instance.seen_at
        return f"has not been heard of for {age_s:.0f} s" if age_s >= self._silent_s else ""

    def models(self) -> list[Model]:
        """How the engines that are attached to nodes name the chunks of a prompt, of those that have told."""
        return [
            Model(engine.engine, engine.url, engine.layout, engine.shape)
            for each in self.all().values()
            if each.report is not None and not self.problem(each)
            for engine in each.report.engines
            if engine.layout and engine.shape
        ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))[:_NAMED])


def _unknown(name: str, known: Collection[str]) -> SelectionError:
    return SelectionError(f"no node {name!r:.80} is known here; there are {_listed(known) or 'none'}")
