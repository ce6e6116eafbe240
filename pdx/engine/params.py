"""`kv_transfer_params` of a request, checked. They come from the network: nothing in them is believed."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdx.errors import ProtocolError
from pdx.wire.messages import TransferId

NodeName = Annotated[str, Meta(max_length=256)]  # looked up in the node's roster, never an address


class TransferParams(msgspec.Struct, frozen=True):
    """A request's part in a transfer. Names that PDX does not know are left to whoever put them there.

    No address, key or block id is taken from here: a transfer is found by its unguessable id, and its bytes by the
    content of the request's own prompt.
    """

    do_remote_decode: bool = False  # this engine prefills for another
    do_remote_prefill: bool = False  # another engine has prefilled for this one
    transfer_id: TransferId | None = None
    decode_node: NodeName = ""  # of a prefill leg: the node that its chunks are pushed to
    prefill_node: NodeName = ""  # of a decode leg: the node that has them, should some be missing
    prefill_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None  # prompt tokens of the prefill leg


def parse_params(params: Any) -> TransferParams | None:
    """The request's part in a transfer, or None if it has none.

    :raises ProtocolError: it claims a part but what it says makes no sense.
    """
    if params is None:
        return None
    try:
        parsed = msgspec.convert(params, TransferParams)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"kv_transfer_params: {error}") from error
    if not parsed.do_remote_decode and not parsed.do_remote_prefill:
        return None
    if parsed.do_remote_decode and parsed.do_remote_prefill:
        raise ProtocolError("kv_transfer_params: do_remote_decode and do_remote_prefill exclude each other")
    if parsed.transfer_id is None:
        raise ProtocolError("kv_transfer_params: transfer_id is missing")
    return parsed
