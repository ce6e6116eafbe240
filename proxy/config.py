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
    port: Annotated[int, Meta(ge=0, le=65_535), option("Port to serve HTTP on; 0: any free port.")] = 8000
    workers: Annotated[
        int,
        Meta(ge=1, le=64),
        option(
            "Processes that serve the port together. --control and --admin apply to the first; each further one uses "
            "the next port, or the path with its number appended."
        ),
    ] = 1
    control: Annotated[
        Place,
        option(
            "Address for reports of nodes: ipc:///path or tcp://IP:PORT.", default="$PDX_PROXY, else this user's socket"
        ),
    ] = ""
    keys: Annotated[FileName, option("Secret key made by `pdx keygen`, for nodes on other hosts.", section="Trust")] = (
        ""
    )
    roster: Annotated[FileName, option("File with the names and public keys of nodes; requires --keys.")] = ""
    discover: Annotated[
        Where,
        option("Where nodes and this proxy find each other: kubernetes:SERVICE[.NAMESPACE] or etcd:URL/PREFIX."),
    ] = ""
    prefill: Annotated[Urls, option("URL of a prefill engine; repeatable.", section="Engines")] = ()
    decode: Annotated[Urls, option("URL of a decode engine, which may also be a prefill engine; repeatable.")] = ()
    engine_ca: Annotated[
        FileName, option("CA certificates for engines with TLS.", default="the system's, or $SSL_CERT_FILE")
    ] = ""
    engine_key: Annotated[
        FileName, option("File with the engines' --api-key. Clients' keys are then not forwarded to engines.")
    ] = ""
    api_keys: Annotated[
        FileName,
        option(
            "File with clients' keys, one per line: NAME KEY, and limits: max-concurrent=N per-minute=N. Clients' "
            "keys are then not forwarded to engines; see --engine-key.",
            default="none; everyone is admitted",
            section="Clients",
        ),
    ] = ""
    tls_cert: Annotated[FileName, option("Serve HTTPS with this certificate chain, in PEM.", default="HTTP")] = ""
    tls_key: Annotated[FileName, option("The certificate's private key.", default="in --tls-cert")] = ""
    max_concurrent: Annotated[
        Requests,
        option("Requests served at a time, divided among workers; others wait. 0: unlimited."),
    ] = 0
    max_queue: Annotated[
        Requests, option("Requests that may wait, at most --first-byte-timeout; others get 429 with Retry-After.")
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
            "Which engine prefills: each in turn, the one with the fewest requests, the one that had the session's "
            "last turn (header X-Session-ID), or the one that will have the prompt first, given what is cached where "
            "(implies --chunk-index)."
        ),
    ] = Routing.LEAST_LOADED
    # 16 tokens are one block of most engines' KV cache, the least two legs can hand over. Computing so few beside
    # other requests' tokens does not lengthen a decode engine's step.
    min_split_tokens: Annotated[
        Tokens,
        option(
            "A prompt shorter than this goes to one engine; with --routing prefix, also one of which fewer tokens "
            "are missing there. Four bytes of text count as a token."
        ),
    ] = 16
    client_priority: Annotated[
        int, Meta(ge=0, le=9), option("Highest priority that a client may give its chunks; higher ones are clipped.")
    ] = 9
    max_body_bytes: Annotated[BodyBytes, option("Largest body of a request.")] = 64 << 20  # includes images
    max_bodies_bytes: Annotated[
        BodiesBytes,
        option("Total size of the bodies of requests in progress; each worker has its share, and at least --max-body."),
    ] = 512 << 20
    max_header_bytes: Annotated[HeaderBytes, option("Largest header of a request, such as tokens and cookies.")] = (
        64 << 10
    )
    allowed_origins: Annotated[
        Origins,
        option(
            "Allow scripts on web pages of this origin, such as https://example.org; *: all; repeatable.",
            default="none",
        ),
    ] = ()
    debug_headers: Annotated[bool, option("Add the headers x-pdx-transfer-id and x-pdx-mode to answers.")] = False
    first_byte_timeout_s: Annotated[
        PositiveSeconds, option("Time limit for an engine to prefill, and to begin a stream.", section="Time limits")
    ] = 600.0
    answer_timeout_s: Annotated[
        PositiveSeconds, option("Time limit for an engine's complete answer, if it is not streamed.")
    ] = 3600.0
    idle_timeout_s: Annotated[
        PositiveSeconds, option("How long a started answer may pause, and a client may read nothing.")
    ] = 120.0
    drain_s: Annotated[
        Seconds, option("Time for requests in progress after SIGTERM; a second signal ends them at once.")
    ] = 30.0
    # A silent node carries no KV after this time. Nodes report once a second, but one that is starved of CPU time
    # may miss some reports while the proxy runs on.
    heartbeat_timeout_s: PositiveSeconds = 6.0
    body_timeout_s: PositiveSeconds = 60.0  # plus one second for every 64 KiB received
    admin: Annotated[
        Place,
        option(
            "Serve a status page, /metrics and /pdx/requests, without a key, at HOST:PORT or a Unix socket's /path; "
            "also /cache, at a Unix socket or with --cache-token-file, which the page's data then requires as well.",
            default="nowhere",
            section="Administration",
        ),
    ] = ""
    cache_token_file: Annotated[
        FileName,
        option("File with the token that cache verbs at --admin require.", default="none; verbs only at a Unix socket"),
    ] = ""
    otlp_traces_endpoint: Annotated[
        Place,
        option(
            "Send traces to the OpenTelemetry collector at this URL, by gRPC or by "
            "$OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.",
            default="$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else nowhere",
        ),
    ] = ""
    otlp_traces_sample: Annotated[
        float,
        Meta(ge=0, le=1),
        shown_as("SHARE"),
        option("Share of requests without a traceparent to trace; for others, its flag decides."),
    ] = 1.0
    chunk_index: Annotated[bool, option("Keep an index of which node has which chunks in which tier.")] = False
    chunk_index_limit: Annotated[
        int, Meta(ge=1, le=1 << 31), shown_as("CHUNKS"), option("Chunks in the index; each takes about 110 bytes.")
    ] = 10_000_000

    @property
    def is_keyed(self) -> bool:
        """Whether `Authorization` headers of clients are meant for this proxy, and are not forwarded to engines."""
        return bool(self.api_keys or self.engine_key)
