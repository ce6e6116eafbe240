"""Settings of `pdx proxy`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from pdx.config import FileName, PositiveSeconds, Seconds, Where
from pdx.options import option, shown_as

Urls = Annotated[tuple[str, ...], shown_as("URL")]
Origins = Annotated[tuple[str, ...], shown_as("ORIGIN")]
Place = Annotated[str, shown_as("ADDRESS")]
Requests = Annotated[int, Meta(ge=0, le=1 << 20), shown_as("REQUESTS")]
Tokens = Annotated[int, Meta(ge=0, le=1 << 31), shown_as("TOKENS")]
BodyBytes = Annotated[int, Meta(ge=1 << 10, le=1 << 32), shown_as("SIZE")]
HeaderBytes = Annotated[int, Meta(ge=8 << 10, le=512 << 10), shown_as("SIZE")]  # all together have 1 MiB
BodiesBytes = Annotated[int, Meta(ge=1 << 10), shown_as("SIZE")]


class Routing(StrEnum):
    """How to choose among healthy engines for a prompt: see `pdx.proxy.placing`."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    SESSION = "session"  # the engine of the session's last turn, unless others have far less to do
    PREFIX = "prefix"


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `pdx proxy`, each defined once. Engines listed here work without a node."""

    host: Annotated[str, option("Address to serve HTTP on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535), option("0: any.")] = 8000
    workers: Annotated[
        int,
        Meta(ge=1, le=64),
        option(
            "Processes that serve the port together. --control and --admin are the first one's; each further one has "
            "the next port, or that path with its number behind it."
        ),
    ] = 1
    control: Annotated[
        Place,
        option("Where nodes report: ipc:///path or tcp://IP:PORT.", default="$PDX_PROXY, else this user's socket"),
    ] = ""
    keys: Annotated[FileName, option("Secret key of `pdx keygen`, for nodes on other hosts.", section="Trust")] = ""
    roster: Annotated[FileName, option("Names the nodes and their public keys; goes with --keys.")] = ""
    discover: Annotated[
        Where,
        option(
            "Nodes find this proxy there, and it the hosts of nodes: kubernetes:SERVICE[.NAMESPACE] or etcd:URL/PREFIX."
        ),
    ] = ""
    prefill: Annotated[Urls, option("An engine that prefills; may be repeated.", section="Engines")] = ()
    decode: Annotated[Urls, option("An engine that decodes; may be repeated, and may also prefill.")] = ()
    engine_ca: Annotated[
        FileName, option("Certificates that sign those of engines with TLS.", default="the system's, or $SSL_CERT_FILE")
    ] = ""
    engine_key: Annotated[
        FileName, option("Holds the --api-key of the engines. Clients' own keys do not reach engines then.")
    ] = ""
    api_keys: Annotated[
        FileName,
        option(
            "A line NAME KEY for each key that clients may show, and what that one may ask: max-concurrent=N "
            "per-minute=N. Clients' keys do not reach engines then; see --engine-key.",
            default="none; everybody is let in",
            section="Clients",
        ),
    ] = ""
    tls_cert: Annotated[
        FileName, option("Serve HTTPS with this certificate and those that lead to its CA, in PEM.", default="HTTP")
    ] = ""
    tls_key: Annotated[FileName, option("Its private key.", default="in --tls-cert")] = ""
    max_concurrent: Annotated[
        Requests,
        option("Serve so many requests at a time, each worker its share; others wait. 0: any number."),
    ] = 0
    max_queue: Annotated[
        Requests, option("So many wait, at most --first-byte-timeout; others get 429 with Retry-After.")
    ] = 1024
    forward: Annotated[
        bool,
        option(
            "Send the first token of a greedy, streamed completion as soon as the prefill engine has it.",
            section="Requests",
        ),
    ] = True
    routing: Annotated[
        Routing,
        option(
            "Who prefills: each in turn, who has the fewest requests, who had the session's last turn (header "
            "X-Session-ID), or who has the prompt soonest by what is cached where (implies --chunk-index)."
        ),
    ] = Routing.LEAST_LOADED
    # 16 tokens are one block of most engines' KV cache, the least two legs can hand over. Computing so few beside
    # other requests' tokens does not lengthen a decode engine's step.
    min_split_tokens: Annotated[
        Tokens,
        option(
            "A shorter prompt goes to one engine, and by --routing prefix one of which less is missing there; of text, "
            "four bytes count as a token."
        ),
    ] = 16
    client_priority: Annotated[
        int, Meta(ge=0, le=9), option("The most priority that a client may give its chunks; more is clipped.")
    ] = 9
    max_body_bytes: Annotated[BodyBytes, option("The largest body of a request.")] = 64 << 20  # includes images
    max_bodies_bytes: Annotated[BodiesBytes, option("Of all requests under way together.")] = 512 << 20
    max_header_bytes: Annotated[HeaderBytes, option("The largest header of a request: tokens, cookies.")] = 64 << 10
    allowed_origins: Annotated[
        Origins,
        option(
            "Let in scripts of web pages from there, as https://example.org; *: all; may be repeated.", default="none"
        ),
    ] = ()
    debug_headers: Annotated[
        bool, option("Say in headers x-pdx-transfer-id and x-pdx-mode how an answer came about.")
    ] = False
    first_byte_timeout_s: Annotated[
        PositiveSeconds, option("How long an engine may take to prefill, and to begin a stream.", section="Time limits")
    ] = 600.0
    answer_timeout_s: Annotated[
        PositiveSeconds, option("How long an engine may take for an answer that is not streamed: it comes as a whole.")
    ] = 3600.0
    idle_timeout_s: Annotated[
        PositiveSeconds, option("How long an answer that has begun may pause, and a client may take nothing of it.")
    ] = 120.0
    drain_s: Annotated[
        Seconds, option("After SIGTERM, requests under way have so long; a second signal ends them at once.")
    ] = 30.0
    # A silent node carries no KV after this time. Nodes report once a second, but one that is starved of CPU time
    # may miss some reports while the proxy runs on.
    heartbeat_timeout_s: PositiveSeconds = 6.0
    body_timeout_s: PositiveSeconds = 60.0  # plus one second for every 64 KiB received
    admin: Annotated[
        Place,
        option(
            "Serve a status page, /metrics and /pdx/requests, without a key, at HOST:PORT or a Unix socket's /path; "
            "/cache, too, at a Unix socket or with --cache-token-file, which the page's figures then need as well.",
            default="nowhere",
            section="Administration",
        ),
    ] = ""
    cache_token_file: Annotated[
        FileName,
        option("Who shows the token in it may say cache verbs at --admin.", default="none; at a Unix socket alone"),
    ] = ""
    otlp_traces_endpoint: Annotated[
        Place,
        option(
            "Send traces to the OpenTelemetry collector at this URL, by gRPC, or as "
            "$OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says.",
            default="$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else nowhere",
        ),
    ] = ""
    otlp_traces_sample: Annotated[
        float,
        Meta(ge=0, le=1),
        shown_as("SHARE"),
        option("Of requests that come without a traceparent, so many; its flag decides about others."),
    ] = 1.0
    chunk_index: Annotated[bool, option("Know which node has which chunks in which tier, as nodes tell.")] = False
    chunk_index_limit: Annotated[
        int, Meta(ge=1, le=1 << 31), shown_as("CHUNKS"), option("Of so many chunks; each takes about 110 bytes.")
    ] = 10_000_000

    @property
    def is_keyed(self) -> bool:
        """Whether `Authorization` headers of clients are meant for this proxy, and are not forwarded to engines."""
        return bool(self.api_keys or self.engine_key)
