"""Hints of clients, which are removed from their requests, and hints of controllers about sessions.

Session names are clients' own words. Engines and nodes get digests of them, so that the header `X-Session-ID` and the
envelope refer to the same session in the same way.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
from msgspec import Raw

from pdx.errors import SelectionError
from pdx.proxy.plan import Body
from pdx.wire.hints import OWN, Envelope, parse

FIELD = "pdx_hints"  # of a request body
HEADER = "X-PDX-Hints"  # of the answer
MAX_BYTES = 16 << 10  # of an envelope
_SALT = "cache_salt"
_SALT_BYTES = 64 << 10
_NOT_READ: list[Any] = []  # stands for an envelope that is rejected as a whole


def digest(session: str) -> str:
    """The session name that nodes and engines see: of fixed length, and free of whatever a client put into the name."""
    return hashlib.blake2b(session.encode(errors="surrogatepass"), digest_size=16).hexdigest() if session else ""


def take(body: Body, session: str) -> tuple[Body, Envelope]:
    """Split a client's body into the body without its envelope, and the envelope with session names replaced by
    digests. `session`: the name in the header, if any; an envelope may name another one."""
    said = body.get(FIELD)
    if FIELD in body:
        body = {name: value for name, value in body.items() if name != FIELD}
    return body, _hidden(parse(_read(said, MAX_BYTES, _NOT_READ), _salt(body)), session)


def _salt(body: Body) -> str:
    salt = _read(body.get(_SALT), _SALT_BYTES, "")
    return salt if isinstance(salt, str) else ""


def _read(value: Any, most: int, otherwise: Any) -> Any:
    """Parse a field that is still raw; `otherwise` if it is longer than `most`."""
    if not isinstance(value, Raw):
        return value
    try:
        return json.loads(bytes(value)) if len(memoryview(value)) <= most else otherwise
    except (ValueError, RecursionError):
        return otherwise


def _hidden(envelope: Envelope, session: str) -> Envelope:
    hints = envelope.hints
    told = msgspec.structs.replace(
        hints,
        session=digest(hints.session or session),
        prefetch=[digest(name) if name != OWN else OWN for name in hints.prefetch],
        demote=[digest(name) if name != OWN else OWN for name in hints.demote],
    )
    return msgspec.structs.replace(envelope, hints=told)


def advice(raw: bytes) -> Envelope:
    """Parse an envelope of the proxy's operator: any priority is allowed, session names become digests, and
    `cache_salt` may select the tenant.

    :raises SelectionError: it is not an envelope, or names no session.
    """
    if len(raw) > MAX_BYTES:
        raise SelectionError(f"the hints have more than {MAX_BYTES} bytes")
    said = _read(Raw(raw), MAX_BYTES, _NOT_READ)
    salt = said.pop(_SALT, None) if isinstance(said, dict) else None
    if not isinstance(salt, str | None):
        raise SelectionError(f"the {_SALT} of the hints is no text")
    envelope = parse(said, salt)
    whole = next((verdict for verdict in envelope.decided if verdict.field == "version"), None)
    if whole is not None:
        raise SelectionError(f"the hints are refused: {whole.text}")
    if not envelope.hints.session:
        raise SelectionError("the hints name no session: the proxy knows no chunks")
    return _hidden(envelope, "")
