"""A request's parameters: its part in a transfer, and its hints. Both come from the network."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdx.errors import ProtocolError
from pdx.wire.base import TransferId
from pdx.wire.hints import Envelope, parse

NodeName = Annotated[str, Meta(max_length=256)]  # looked up in the node's roster, never an address


class TransferParams(msgspec.Struct, frozen=True):
    """A request's part in a transfer. Names that PDX does not know are ignored: others may use them.

    No address, key or block id is taken from here: a transfer is found by its unguessable id, and its bytes by the
    content of the request's own prompt.
    """

    do_remote_decode: bool = False  # this engine prefills for another
    do_remote_prefill: bool = False  # another engine has prefilled for this one
    transfer_id: TransferId | None = None  # if a prefill leg has none, its engine draws one
    decode_node: NodeName = ""  # of a prefill leg: the node that its chunks are pushed to
    prefill_node: NodeName = ""  # of a decode leg: the node to ask for missing chunks
    prefix_node: NodeName = ""  # of any other request: a node that may have more of its prompt than the engine's own
    is_early: bool = False  # a decode leg sent together with the prefill leg: nodes may not know of the transfer yet
    prefill_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None  # prompt tokens of the prefill leg, as asked


def parse_params(params: Any, *, may_name: bool = True) -> TransferParams:
    """The request's part in a transfer, if it has one. Raises ProtocolError if it makes no sense.

    Routers made for NIXL name no transfer: the prefill engine does, and its answer tells the decode leg
    (`TrackedRequest.handed_on`). `may_name`: no other connector of this engine can be meant.
    """
    if params is None:
        return TransferParams()
    try:
        parsed = msgspec.convert(params, TransferParams)
        msgspec.msgpack.encode(parsed)  # a name with half of a surrogate pair cannot be sent
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ProtocolError(f"kv_transfer_params: {error}") from error
    if not parsed.do_remote_decode and not parsed.do_remote_prefill:
        return TransferParams(prefix_node=parsed.prefix_node)
    if parsed.do_remote_decode and parsed.do_remote_prefill:
        raise ProtocolError("kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other")
    if parsed.transfer_id is None and parsed.do_remote_decode and may_name:
        return msgspec.structs.replace(parsed, transfer_id=secrets.token_hex(16))
    if parsed.transfer_id is None:
        raise ProtocolError(
            "kv_transfer_params: a leg without a transfer_id, as for another connector; give a decode leg what the "
            "answer to its prefill leg has as kv_transfer_params"
        )
    return parsed


def parse_hints(params: Any, salt: str | None = None) -> Envelope:
    """The request's hints: the envelope `pdx_hints` in its parameters. `salt`: its cache salt. Never fails."""
    return parse(params.get("pdx_hints") if isinstance(params, Mapping) else None, salt)
