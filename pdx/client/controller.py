"""Manage the chunks of nodes from Python: look up, move, pin and clear the chunks of a prompt.

with pdx.Controller() as cache:                      # the node of this host
    cache.lookup([1, 2, 3, …])                       # {"alpha": {"host": 512, "disk": 1024}}
    job = cache.move(("alpha", "host"), ("alpha", "disk"), [1, 2, 3, …])
    cache.wait(job)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pdx.client.connection import error_of
from pdx.client.reach import LocalNodes, ThroughProxy
from pdx.client.results import ALL, Health, Job, Lookup, Place
from pdx.closing import Closing
from pdx.config import default_node
from pdx.errors import NodeError, ProtocolError, SelectionError
from pdx.wire import verbs
from pdx.wire.messages import Refused
from pdx.wire.prompt import Prompt

Tokens = Prompt | Sequence[int] | str
_PlaceLike = Place | tuple[str, str] | str
_NOTHING = verbs.Selection()  # until `LocalNodes` or the proxy fills in the prompt's chunks
_LOOK_S, _SELDOM_S = 0.02, 0.25  # first and longest pause between two checks of a job


class Controller(Closing):
    """A controller of the nodes at `addresses`, sockets of this host (default: PDX_NODE, else this user's); or of all
    nodes that a `proxy` knows: the URL or Unix socket of its --admin, with the `token` that it requires.

    `instance` is a node's name; empty means the only node, "*" all nodes. Among several nodes, one that refuses has a
    `Refused` in the answer. Tokens are a list of ids, a text, or a `Prompt`, which may also name a request. With
    `dry_run` nothing is done, and the answer says what would be done. Not thread-safe. `close()` ends everything except
    jobs, which belong to their node.

    Each method raises the error with which a node or the proxy refuses it, and, unless it says otherwise:

    :raises NodeUnavailable: no node answers within `timeout_s`. :raises ProxyError: the proxy does not.
    :raises SelectionError: no node has that name, or the tokens fill no chunk of a model that is known there.
    """

    def __init__(self, *addresses: str, proxy: str = "", token: str = "", timeout_s: float = 10.0) -> None:
        if proxy and addresses:
            raise SelectionError("nodes are reached at their sockets or through a proxy, and not both")
        if proxy:
            self._reach: ThroughProxy | LocalNodes = ThroughProxy(proxy, token, timeout_s)
        else:
            self._reach = LocalNodes(addresses or [default_node()], timeout_s)

    def __repr__(self) -> str:
        return f"<Controller {self._reach!r}>"

    @property
    def instances(self) -> list[str]:
        """The names of the nodes that can be asked."""
        return self._reach.names()

    # ---- looking ----------------------------------------------------------------------------

    def lookup(
        self, tokens: Tokens, instances: Sequence[str] = (), *, wait_s: float = 5.0
    ) -> dict[str, dict[str, int]]:
        """How many leading tokens, in whole chunks, each tier of each node has.

        :raises SelectionError: also if no engine has said how many tokens a chunk has (see `find`).
        """
        found = self.find(tokens, instances, wait_s=wait_s)
        if not found.chunk_tokens:
            raise SelectionError("no engine is attached that says how many tokens a chunk has; `find` counts chunks")
        return found.tiers

    def find(self, tokens: Tokens, instances: Sequence[str] = (), *, wait_s: float = 5.0) -> Lookup:
        """As `lookup`, with everything that nodes report. Tiers that must ask a remote store get `wait_s` to do so."""
        outcomes = self._reach.find(prompt_of(tokens), list(instances), wait_s)
        return Lookup.of(
            {name: each for name, each in outcomes.items() if isinstance(each, verbs.Found)},
            {name: each.text for name, each in outcomes.items() if isinstance(each, Refused)},
        )

    def query_ip(self, instances: Sequence[str] = ()) -> dict[str, str | Refused]:
        """The address of each node that its peers connect to."""
        outcomes = self._outcomes(verbs.Status(), instances)
        return {name: each if isinstance(each, Refused) else each.listen for name, each in outcomes.items()}

    def health(self, instance: str = ALL) -> dict[str, Health]:
        """The health of nodes; a node that does not answer is not well."""
        names = self._names(instance)
        try:
            told: dict[str, Any] = {**self._reach.ask(verbs.Status(), names)}
        except (NodeError, ProtocolError) as error:
            told = {name: Refused.of(error) for name in names or self._reach.names()}
        return {
            name: Health(None, each.text) if isinstance(each, Refused) else Health(each) for name, each in told.items()
        }

    def ls(self, instance: str = ALL, *, session: str = "", model: str = "") -> dict[str, verbs.Listing | Refused]:
        """List the models and sessions with chunks in memory whose names contain `model` or `session`, respectively."""
        return self._each(verbs.List(session, model), instance)

    # ---- changing ---------------------------------------------------------------------------

    def move(
        self, source: _PlaceLike, target: _PlaceLike, tokens: Tokens, *, keep: bool = False, dry_run: bool = False
    ) -> Job:
        """Copy a prompt's chunks from one tier to another, also of another node, and drop them at the source unless
        `keep`. A source without a tier means any tier of its node; a target without one means the first arena."""
        from_, to = Place.of(source), Place.of(target)
        node = "" if to.node == from_.node else to.node
        verb = verbs.Move(_NOTHING, from_.tier, to.tier, node, keep, dry_run)
        return self._job(verb, from_.node, prompt_of(tokens))

    def prefetch(
        self, tokens: Tokens, instance: str = "", to: str = "", *, dry_run: bool = False
    ) -> dict[str, verbs.Effect | Refused]:
        """Load a prompt's chunks into memory, "host" or "gpu" (default: the first arena), as if a request for them were
        on its way; returns how many are not there yet."""
        return self._each(verbs.Prefetch(_NOTHING, to, dry_run), instance, prompt_of(tokens))

    def clear(
        self,
        tokens: Tokens | None,
        instance: str = "",
        tier: str = "",
        *,
        everything: bool = False,
        dry_run: bool = False,
    ) -> dict[str, verbs.Effect | Job | Refused]:
        """Delete a prompt's chunks, pinned or not, from a tier or all tiers; or, as a job, `everything` (no tokens)."""
        if everything == (tokens is not None):
            raise SelectionError("clear takes tokens, or everything and no tokens")
        prompt = prompt_of(tokens) if tokens is not None else None
        done = self._each(verbs.Clear(_NOTHING, tier, everything, dry_run), instance, prompt)
        return {name: Job(name, each) if isinstance(each, verbs.JobStatus) else each for name, each in done.items()}

    def pin(
        self, tokens: Tokens, instance: str = "", tier: str = "", *, dry_run: bool = False
    ) -> dict[str, verbs.Effect | Refused]:
        """Pin a prompt's chunks in a tier (default: the first that has all) until they are unpinned there."""
        return self._each(verbs.PinIn(_NOTHING, tier, True, dry_run), instance, prompt_of(tokens))

    def unpin(
        self, tokens: Tokens, instance: str = "", tier: str = "", *, dry_run: bool = False
    ) -> dict[str, verbs.Effect | Refused]:
        """Remove one pin from each of a prompt's chunks in a tier."""
        return self._each(verbs.PinIn(_NOTHING, tier, False, dry_run), instance, prompt_of(tokens))

    def compress(self, tokens: Tokens, instance: str, tier: str, method: str, *, dry_run: bool = False) -> Job:
        """Store a prompt's chunks in a tier, encoded by the codec `method`."""
        return self._job(verbs.Recode(_NOTHING, tier, method, dry_run=dry_run), instance, prompt_of(tokens))

    def decompress(self, tokens: Tokens, instance: str, tier: str, *, dry_run: bool = False) -> Job:
        """Store a prompt's chunks in a tier without a codec, as they are in memory."""
        return self._job(verbs.Recode(_NOTHING, tier, "none", dry_run=dry_run), instance, prompt_of(tokens))

    def evict(
        self, below: int, nbytes: int, instance: str = "", tier: str = "", *, dry_run: bool = False
    ) -> dict[str, verbs.Effect | Refused]:
        """Evict up to `nbytes` of chunks of a priority under `below` from memory. Dry runs count up to MAX_EVICTED."""
        done = self._each(verbs.Evict(below, nbytes, tier, dry_run), instance)
        return (
            done if dry_run else {name: self._evicted(name, below, nbytes, tier, each) for name, each in done.items()}
        )

    def _evicted(
        self, name: str, below: int, nbytes: int, tier: str, first: verbs.Effect | Refused
    ) -> verbs.Effect | Refused:
        """The total effect at one node, which evicts at most MAX_EVICTED chunks at a time."""
        if isinstance(first, Refused):
            return first
        (kept,) = (last,) = first.tiers
        while last.chunks == verbs.MAX_EVICTED and kept.nbytes < nbytes:
            more = self._each(verbs.Evict(below, nbytes - kept.nbytes, tier), name)[name]
            if isinstance(more, Refused):
                break
            (last,) = more.tiers
            kept = verbs.Kept(kept.name, kept.chunks + last.chunks, kept.nbytes + last.nbytes)
        return verbs.Effect([kept])

    # ---- engines ----------------------------------------------------------------------------

    def drain(self, engine: str, instance: str = ALL, *, undo: bool = False) -> dict[str, verbs.Drained | Refused]:
        """Have proxies send an engine, given by URL or name, no more requests as long as others can serve them, or
        (`undo`) send it requests again. Returns by node how many it still has; nodes without that engine refuse.

        :raises NodeError: also if no node has it.
        """
        return self._each(verbs.Drain(engine, not undo), instance)

    # ---- jobs -------------------------------------------------------------------------------

    def check_finish(self, job: Job | str) -> Job:
        """The present state of a job. :raises JobUnknown: its node knows no such job (any more)."""
        name = _name_of(job)
        return self._job(verbs.CheckFinish(name), verbs.node_of(name))

    def cancel(self, job: Job | str) -> Job:
        """End a job: chunks that it has moved stay moved. No-op for a job that is over.

        :raises JobUnknown: see `check_finish`.
        """
        name = _name_of(job)
        return self._job(verbs.EndJob(name), verbs.node_of(name))

    def wait(
        self, job: Job | str, on_progress: Callable[[Job], None] | None = None, timeout_s: float = float("inf")
    ) -> Job:
        """Wait up to `timeout_s` until a job is over; return its last state. `on_progress` is called with each state.

        :raises JobUnknown: see `check_finish`. :raises NodeUnavailable: its node has died, and the job with it.
        """
        if isinstance(job, Job) and job.is_over:
            return job
        until, pause_s = time.monotonic() + timeout_s, _LOOK_S
        while True:
            now = self.check_finish(job)
            if on_progress is not None:
                on_progress(now)
            left_s = until - time.monotonic()
            if now.is_over or left_s <= 0:
                return now
            time.sleep(min(pause_s, left_s))
            pause_s = min(1.5 * pause_s, _SELDOM_S)

    def jobs(self, instance: str = ALL) -> dict[str, list[Job] | Refused]:
        """By node, the running jobs and the last ones that are over, the newest first."""
        told = self._each(verbs.Jobs(), instance)
        return {
            name: listed if isinstance(listed, Refused) else [Job(name, status) for status in listed.jobs]
            for name, listed in told.items()
        }

    # ---- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Detach from the nodes; jobs go on. Idempotent."""
        self._reach.close()

    # ---- asking -----------------------------------------------------------------------------

    def _names(self, instance: str) -> list[str]:
        if instance == ALL:
            return []
        if instance:
            return [instance]
        names = self._reach.names()
        if len(names) != 1:
            raise SelectionError(f"say which node of {', '.join(names) or 'none'}, or {ALL} for all")
        return names

    def _outcomes(self, verb: verbs.AnyVerb, names: Sequence[str], prompt: Prompt | None = None) -> dict[str, Any]:
        """The answer to this verb, or a `Refused`, by node.

        :raises NodeError: all nodes refuse; the error is the first one's.
        """
        outcomes = self._reach.ask(verb, names, prompt)
        refused = [outcome for outcome in outcomes.values() if isinstance(outcome, Refused)]
        if refused and len(refused) == len(outcomes):
            raise error_of(refused[0])
        return {**outcomes}

    def _each(self, verb: verbs.AnyVerb, instance: str, prompt: Prompt | None = None) -> dict[str, Any]:
        return self._outcomes(verb, self._names(instance), prompt)

    def _job(self, verb: verbs.AnyVerb, instance: str, prompt: Prompt | None = None) -> Job:
        names = self._names(instance)
        if len(names) != 1:
            raise SelectionError("a job is of one node: name it")
        ((name, outcome),) = self._outcomes(verb, names, prompt).items()
        return Job(name, outcome)


def prompt_of(tokens: Tokens) -> Prompt:
    """Token ids or a text as a prompt for the only model there is."""
    if isinstance(tokens, Prompt):
        return tokens
    return Prompt(text=tokens) if isinstance(tokens, str) else Prompt(tokens=list(tokens))


def _name_of(job: Job | str) -> str:
    if isinstance(job, Job) and not job.name:
        raise SelectionError("that job was only planned: it was asked for with dry_run")
    return job.name if isinstance(job, Job) else job
