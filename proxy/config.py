"""Settings of `pdx proxy`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.config import PositiveSeconds


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `pdx proxy`; engines named here need no node to be known."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8000  # 0: any free port
    prefill: tuple[str, ...] = ()  # base URLs of engines that prefill
    decode: tuple[str, ...] = ()  # base URLs of engines that decode; one URL may be in both
    engine_ca: str = ""  # file of certificates that sign those of engines with TLS; empty: the system's
    control: str = ""  # where nodes report, ipc or tcp; empty: PDX_PROXY, else this host's default socket
    keys: str = ""  # this proxy's secret key file, made by `pdx keygen`; needed for nodes beyond this host
    roster: str = ""  # file that names the nodes and their public keys; goes with `keys`
    forward: bool = True  # send a completion's first token to the client before the decode leg starts
    # Shorter prompts go to one engine. 16 tokens are one block of most engines' KV cache, the least that two legs could
    # hand over; a decode engine computes so few beside the tokens of its other requests without a step getting longer.
    min_split_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] = 16
    client_priority: Annotated[int, Meta(ge=0, le=9)] = 9  # the most that clients' hints may ask for
    first_byte_timeout_s: PositiveSeconds = 600.0  # of a stream, and of a prefill leg's answer, which is one token
    answer_timeout_s: PositiveSeconds = 3600.0  # of an answer that is not streamed: it has no byte before its end
    idle_timeout_s: PositiveSeconds = 120.0  # without a byte of an answer that has begun
    # No KV goes through a node that is silent for longer. Nodes report once a second, but one whose processor is taken
    # from it may miss some while the proxy runs on.
    heartbeat_timeout_s: PositiveSeconds = 6.0
    max_body_bytes: Annotated[int, Meta(ge=1 << 10, le=1 << 32)] = 64 << 20  # pictures are in it as text
    max_bodies_bytes: Annotated[int, Meta(ge=1 << 10)] = 512 << 20  # of all requests under way together
    body_timeout_s: PositiveSeconds = 60.0  # and a second more for each 64 KiB that have come
    admin: str = ""  # where metrics and timelines are told, `HOST:PORT` or a Unix socket's path; empty: nowhere
    cache_token_file: str = ""  # whoever shows the token in it at `admin` may say verbs; empty: at a Unix socket alone
    debug_headers: bool = False  # answers say by which transfer and in which mode they came about
    allowed_origins: tuple[str, ...] = ()  # of web pages whose scripts may read answers; `*`: all
    drain_s: Annotated[float, Meta(ge=0.0, le=86_400.0)] = 30.0  # requests under way at a SIGTERM have so long
    chunk_index: bool = False  # know which node has which chunks in which tier
    chunk_index_limit: Annotated[int, Meta(ge=1, le=1 << 31)] = 10_000_000  # chunks; each takes about 110 bytes
