"""Applications' hints about the future of chunks: one versioned envelope, and the outcome of each of its fields.

    {"version": 1, "session": "chat 7", "priority": 5, "reuse_s": 60, "lease_s": 120}

It comes from outside, so nothing of it is trusted before `parse`: a field that makes no sense is refused by name, and
costs its request nothing. Nodes get the rest as `Hints`, and answer with a `Verdict` for each field.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdx.memory.keys import KEY_BYTES

VERSION = 1  # of the envelope
MAX_FIELDS = 32  # of one envelope
MAX_NAMED = 16  # sessions that one envelope may name in a field
MAX_VERDICTS = 2 * MAX_FIELDS

Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]
SessionName = Annotated[str, Meta(min_length=1, max_length=64)]
Outcome = Literal["accepted", "clipped", "refused"]
Codec = Literal["none", "fp8", "int8"]
Memory = Literal["host", "gpu"]
Reuse = Annotated[str, Meta(pattern=r"^(moved|blended:[01]\.[0-9]{4}:[0-9a-f]{16})\Z")]

FormText = Annotated[str, Meta(max_length=96)]  # of a `pdx.memory.form.Form`; the encoder parses it

_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
OWN = ""  # in `Hints.prefetch` and `Hints.demote`: the chunks of the request, or of the `Advise`, itself


class Hints(msgspec.Struct, array_like=True, frozen=True):
    """What a request knows about the future of its chunks; the store keeps and evicts by it."""

    session: Annotated[str, Meta(max_length=64)]  # requests of one session share their beginning; empty: none
    priority: Annotated[int, Meta(ge=0, le=9)] = 0  # more is more important
    reuse_s: Seconds = 0.0  # the chunks are expected to be wanted again after this; 0: not known
    salt: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""  # the tenant: a digest of the cache salt; empty: none
    ttl_s: Seconds = 0.0  # they are forgotten after this; 0: no limit
    lease_s: Seconds | None = None  # they are not evicted for this; 0: a lease on them ends; None: not set
    prefetch: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=MAX_NAMED)] = []  # sessions, or OWN
    demote: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=MAX_NAMED)] = []  # likewise
    codec: Codec | None = None  # for storing them below memory, as a request asks for it; None: not set
    form: FormText = ""  # the engine's translation of `codec`: the form they keep there; empty: exact
    prefetch_to: Memory | None = None  # where `prefetch` loads to; None: the node's first arena
    reuse: Reuse | None = None  # what a request finds beside its prefix; nodes are not told

    @property
    def asks(self) -> list[str]:
        """The fields that ask for something, each of which nodes answer."""
        said = [name for name in ("session", "priority", "reuse_s", "ttl_s") if getattr(self, name)]
        said += ["lease_s"] if self.lease_s is not None else []
        said += [name for name in ("prefetch", "demote") if getattr(self, name)]
        return said + [name for name in ("codec", "prefetch_to", "reuse") if getattr(self, name) is not None]

    def as_object(self) -> dict[str, Any]:
        """The envelope that says the same, without the salt, for which requests have a field of their own."""
        said = {name: value for name, value in msgspec.structs.asdict(self).items() if value != _DEFAULTS[name]}
        for own in ("salt", "form"):
            said.pop(own, None)
        for name in ("prefetch", "demote"):
            if said.get(name) == [OWN]:
                said[name] = True
        return {"version": VERSION, **said}


NO_HINTS = Hints("")
_DEFAULTS: dict[str, Any] = msgspec.structs.asdict(NO_HINTS)


class Verdict(msgspec.Struct, array_like=True, frozen=True):
    """The outcome of one field; `value`: what it was clipped to, `text`: why, in words."""

    field: Annotated[str, Meta(max_length=32)]
    outcome: Outcome
    text: Annotated[str, Meta(max_length=256)] = ""
    value: Annotated[str, Meta(max_length=32)] = ""

    @property
    def told(self) -> str:
        """The verdict in words."""
        value = f" to {self.value}" if self.value else ""
        return f"{self.outcome}{value}: {self.text}" if self.text else f"{self.outcome}{value}"

    @property
    def as_member(self) -> str:
        """A member of a dictionary in an HTTP header (RFC 8941)."""
        name = self.field if _WORD.fullmatch(self.field) else "unknown"
        value = f":{self.value}" if re.fullmatch(r"[0-9a-z.]+", self.value) else ""
        text = "".join(one for one in self.text if " " <= one <= "~").replace("\\", "").replace('"', "'")
        why = f';why="{text}"' if text else ""
        return f"{name}={self.outcome}{value}{why}"


class Envelope(msgspec.Struct, frozen=True):
    """A parsed envelope: `said` names the fields that it had, `decided` has the verdicts on those that nodes do not
    get, or not in full. `form`: by which the engine keeps its chunks apart from exact ones, beside `Hints.form`; empty:
    none."""

    hints: Hints = Hints("")
    said: tuple[str, ...] = ()
    decided: tuple[Verdict, ...] = ()
    form: str = ""

    def within(self, most_priority: int) -> Envelope:
        """The same envelope with at most that priority."""
        if self.hints.priority <= most_priority:
            return self
        text = "more is above --client-priority"
        clipped = Verdict("priority", "clipped", text, str(most_priority))
        hints = msgspec.structs.replace(self.hints, priority=most_priority)
        return Envelope(hints, self.said, (*self.decided, clipped))

    def answer(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        """The outcome of each field in `said`, in its order. `verdicts`: the nodes'.

        A field that asks for nothing (such as `"prefetch": false`) is accepted.
        """
        found = {name: Verdict(name, "refused", "no node has answered to it") for name in self.hints.asks}
        found.update((verdict.field, verdict) for verdict in (*worst(verdicts), *self.decided))
        return [found.get(name) or Verdict(name, "accepted") for name in self.said]


def worst(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The worst verdict on each field."""
    found: dict[str, Verdict] = {}
    order = ("accepted", "clipped", "refused")
    for verdict in verdicts:
        known = found.get(verdict.field)
        if known is None or order.index(verdict.outcome) > order.index(known.outcome):
            found[verdict.field] = verdict
    return list(found.values())


def tenant(salt: str | None) -> bytes:
    """The nodes' name for requests with this cache salt; empty: the common tenant, of all requests without one."""
    return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest() if salt else b""


_TYPES: dict[str, Any] = {
    "session": SessionName,
    "priority": Annotated[int, Meta(ge=0, le=9)],
    "reuse_s": Seconds,
    "ttl_s": Seconds,
    "lease_s": Seconds,
    "prefetch": bool | Annotated[list[SessionName], Meta(max_length=MAX_NAMED)],
    "demote": bool | Annotated[list[SessionName], Meta(max_length=MAX_NAMED)],
    "codec": Codec,
    "prefetch_to": Memory,
    "reuse": Reuse,
}

_WHY = {"prefetch_to": "it is host or gpu: another tier is no memory that chunks are prefetched into"}


def parse(envelope: Any, salt: str | None = None) -> Envelope:
    """Parse an envelope from outside; `salt`: the cache salt of its request. Never fails.

    Fields that this version does not have, or whose values make no sense, are refused by name; an envelope of another
    version, with too many fields, or that is no object, is refused as a whole.
    """
    nobody = Hints("", salt=tenant(salt))
    if envelope is None:
        return Envelope(nobody)
    if not isinstance(envelope, Mapping):
        return _refused(nobody, "an envelope is an object with the field version")
    if len(envelope) > MAX_FIELDS:
        return _refused(nobody, f"an envelope has at most {MAX_FIELDS} fields, and this one {len(envelope)}")
    version = envelope.get("version")
    if type(version) is not int or version != VERSION:
        text = f"this is version {VERSION}" if "version" in envelope else f"say which version: {VERSION}"
        return _refused(nobody, text)
    values: dict[str, Any] = {}
    refused: list[Verdict] = []
    said = [name for name in envelope if name != "version"]
    names = {name: _shown(str(name), 32) for name in said}
    for name in said:
        if name not in _TYPES:
            refused.append(Verdict(names[name], "refused", f"version {VERSION} has no such field"))
            continue
        try:
            value = msgspec.convert(envelope[name], _TYPES[name])
            msgspec.msgpack.encode(value)  # a string with half of a surrogate pair cannot be sent
            values[name] = value
        except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as error:
            refused.append(Verdict(name, "refused", _WHY.get(name) or _shown(str(error), 200)))
    for name in ("prefetch", "demote"):
        if isinstance(values.get(name), bool):
            values[name] = [OWN] if values[name] else []
    hints = msgspec.structs.replace(nobody, **values)
    return Envelope(hints, tuple(names[name] for name in said), tuple(refused))


def _shown(text: str, most: int) -> str:
    """A client's text, made safe for logs and headers."""
    return "".join(one if one.isprintable() else "?" for one in text[:most])


def _refused(nobody: Hints, text: str) -> Envelope:
    return Envelope(nobody, ("version",), (Verdict("version", "refused", text),))
