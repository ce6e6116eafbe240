"""Settings of the node and the connector: typed and bounded; unknown names are refused.

A setting comes from the command line or the connector's `kv_connector_extra_config`. If neither names the node, the
environment variable PDX_NODE does, else it is the host's default socket; PDX_TRACE likewise stands in for `trace`.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pdx.errors import ConfigError
from pdx.options import Option, option, options_of, shown_as
from pdx.transports.channel import SchemeName

_T = TypeVar("_T")

LEAST_S, MOST_S = 0.001, 86_400.0
PositiveSeconds = Annotated[float, Meta(ge=LEAST_S, le=MOST_S), shown_as("SECONDS")]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9), shown_as("SECONDS")]
ArenaBytes = Annotated[int, Meta(ge=1 << 20, le=1 << 46), shown_as("SIZE")]
DiskBytes = Annotated[int, Meta(ge=1 << 20, le=1 << 50), shown_as("SIZE")]
ReserveBytes = Annotated[int, Meta(ge=0, le=1 << 50), shown_as("SIZE")]
Share = Annotated[float, Meta(gt=0.0, le=1.0), shown_as("SHARE")]
ShareOrNone = Annotated[float, Meta(ge=0.0, le=1.0), shown_as("SHARE")]
Address = Annotated[str, Meta(max_length=256), shown_as("ADDRESS")]  # as messages have it
Addresses = Annotated[str, Meta(max_length=4096, pattern="^[^,]{0,256}(,[^,]{0,256})*$")]
HostPort = Annotated[str, Meta(max_length=256), shown_as("HOST:PORT")]
Url = Annotated[str, Meta(max_length=1024), shown_as("URL")]
Where = Annotated[str, Meta(max_length=1024), shown_as("WHERE")]
Topic = Annotated[str, Meta(max_length=256), shown_as("TOPIC")]
PolicyName = Annotated[str, Meta(max_length=256), shown_as("NAME")]
Name = Annotated[str, shown_as("NAME")]
FileName = Annotated[str, Meta(max_length=4096), shown_as("FILE")]
FolderNames = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=32), shown_as("FOLDER")
]
GpuNames = Annotated[list[Annotated[str, Meta(min_length=1, max_length=64)]], Meta(max_length=32), shown_as("WHICH")]
SchemeNames = Annotated[list[SchemeName], Meta(max_length=32), shown_as("SCHEME")]
NumaChoice = Annotated[str, Meta(pattern=r"^(auto|none|[0-9]{1,4})\Z"), shown_as("auto|none|N")]
HashForm = Literal["int", "bytes"]
MediaForm = Literal["vllm", "tiers"]
StoreChoice = Literal["all", "twice-seen", "write-back"]
CodecChoice = Literal["none", "lossless"]
DigestChoice = Literal["wire", "always", "never"]
_NAME = re.compile(r"[^\s/\x00-\x1f\x7f-\x9f]{1,256}")
ALL_CPUS = range(1024)  # as many as Linux's headers know; the kernel leaves out those that a process may not use
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def runtime_folder() -> Path:
    """This user's private folder for sockets and locks; created with mode 0700.

    :raises ConfigError: it exists but belongs to another user, or others may enter it; or no folder is writable.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    try:
        folder = Path(base) / "pdx" if base else Path(tempfile.gettempdir()) / f"pdx-{os.getuid()}"
    except FileNotFoundError as error:
        raise ConfigError(f"no place for sockets: {error.strerror}; name a writable folder in TMPDIR") from error
    private_folder(folder)
    return folder


def private_folder(folder: Path) -> None:
    """Create `folder` as private to this user, or check that it already is.

    :raises ConfigError: it belongs to another user or others may enter it, it is a link, or it cannot be created.
    """
    try:
        if folder.is_symlink():
            where = os.path.realpath(folder)
            raise ConfigError(f"{folder} is a symbolic link, which is not followed; name the folder itself: {where}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()  # a link that another user put there is not followed
    except OSError as error:
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        is_there = bool(base) and folder.is_relative_to(base)
        hint = f"XDG_RUNTIME_DIR={base} is another user's, after su perhaps? unset it, or " if is_there else ""
        raise ConfigError(f"{folder} cannot be used: {error.strerror}; {hint}name another folder") from error
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must belong to user {os.getuid()} with mode 0700 "
            f"(it has user {info.st_uid}, mode {info.st_mode & 0o777:04o}); fix it or name another folder"
        )


def default_node() -> str:
    """The address of this host's node: PDX_NODE or ipc://<runtime folder>/node.sock."""
    return os.environ.get("PDX_NODE") or f"ipc://{runtime_folder()}/node.sock"


def default_proxy() -> str:
    """The address at which nodes find this host's proxy: PDX_PROXY or ipc://<runtime folder>/proxy.sock."""
    return os.environ.get("PDX_PROXY") or f"ipc://{runtime_folder()}/proxy.sock"


def socket_path(address: str) -> Path:
    """The path in an `ipc://` address.

    :raises ConfigError: not an ipc address, or longer than a Unix socket's path can be.
    """
    if not address.startswith("ipc://") or not address[6:].startswith("/"):
        raise ConfigError(f"{address!r} is not an ipc:///absolute/path address")
    if len(address[6:].encode()) > 100:
        raise ConfigError(f"{address!r} is too long for a Unix socket (100 bytes); choose a shorter path")
    return Path(address[6:])


def parse_bytes(text: str | int) -> int:
    """Bytes in `text`: a number with an optional unit K, M, G, T (binary; "GiB" and "GB" mean the same)."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE | re.ASCII)
    if match is None or ("." in match[1] and not match[2]):
        raise ConfigError(f"{str(text)!r:.80} is not a size; write for example 4GiB, 512M or 1073741824")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a node. The command line, TOML, the connector's options and docs/vllm.md are derived from this."""

    address: str
    proxy: Addresses = ""  # where to report engines and timelines, comma-separated; empty: nowhere
    exit_when_idle_s: Annotated[Seconds, option("End after this long with nothing attached.", default="never")] = 0.0
    arena_bytes: Annotated[
        ArenaBytes,
        option("Host memory for chunks.", default="4GiB; none with --gpu", section="Memory", for_engines=True),
    ] = 4 << 30
    gpu: Annotated[str, Meta(max_length=64)] = ""  # ordinal or UUID of the GPU of the first arena; empty: host memory
    more_gpus: Annotated[
        GpuNames,
        option(
            "Memory for chunks on this GPU (0, 1, … or a UUID), for the engines on it. Repeatable, or a list: 0,1.",
            flag="gpu",
            name="gpus",
            default="none",
        ),
    ] = []
    gpu_arena_bytes: Annotated[ArenaBytes, option("Size of the memory on each GPU.")] = 4 << 30
    numa: Annotated[
        NumaChoice,
        option("NUMA node for host memory and threads; auto: that of the GPU, or of all GPUs if they share one."),
    ] = "auto"
    policy: Annotated[
        PolicyName, option("Eviction policy: lru, s3fifo, gittins, age:SECONDS, idle:SECONDS, or an entry point.")
    ] = "lru"
    salt_quota: Annotated[
        Share, option("If memory is full, chunks of a cache salt beyond this share of it are evicted first.")
    ] = 1.0
    pin_share: Annotated[
        ShareOrNone, option("Share of memory that pins and tenants' leases may hold; further pins are refused.")
    ] = 0.8
    tenant_lease_share: Annotated[
        ShareOrNone, option("Share of memory that leases of one cache salt may hold; 0: no leases.")
    ] = 0.1
    lease_max_s: Annotated[PositiveSeconds, option("Longest lease of a request.", flag="lease-max-s")] = 600.0
    disks: Annotated[
        FolderNames,
        option(
            "Also keep chunks in this folder, beyond the node's end. Repeatable: each folder holds a part.",
            flag="disk",
            default="none",
            section="Disks",
        ),
    ] = []
    disk_limit_bytes: Annotated[DiskBytes, option("Space that chunks may take on each of these disks.")] = 100 << 30
    disk_reserve_bytes: Annotated[ReserveBytes, option("Free space to leave on each of these disks.")] = 1 << 30
    disk_policy: Annotated[PolicyName, option("Eviction policy for these disks, as with --policy.")] = "lru"
    disk_codec: Annotated[CodecChoice, option("Compress chunks on these disks, without loss; costs CPU time.")] = "none"
    remote: Annotated[
        Url,
        option(
            "Shared store: valkey://, rediss:// or s3://BUCKET/PREFIX.",
            default="nowhere",
            section="Remote store",
        ),
    ] = ""
    remote_codec: Annotated[CodecChoice, option("Compress chunks in the remote store, as with --disk-codec.")] = "none"
    remote_ttl_s: Annotated[Seconds, option("Older chunks in the remote store are not used.", default="no limit")] = 0.0
    remote_ca: Annotated[FileName, option("CA certificates for the remote store.", default="the system's")] = ""
    remote_credentials: Annotated[FileName, option("Credentials file for the store.", default="the environment's")] = ""
    remote_s: Annotated[
        PositiveSeconds,
        option("Time limit for loading a chunk from the remote store, or storing one.", flag="remote-timeout"),
    ] = 5.0
    remote_lookup_s: Annotated[
        PositiveSeconds,
        option(
            "Time limit for asking the remote store which chunks it has. Increase it for a distant store.",
            flag="remote-lookup-timeout",
        ),
    ] = 0.25
    fetch_s: Annotated[
        PositiveSeconds,
        option(
            "How long a request waits for chunks from a disk, the remote store or another node.",
            flag="fetch-timeout",
            section="Disks and remote store",
        ),
    ] = 5.0
    peer_lookup_s: Annotated[
        Seconds, option("Time limit for asking peers about a prompt; 0: do not ask.", flag="peer-lookup-timeout")
    ] = 0.005
    store: Annotated[
        StoreChoice,
        option("Chunks to store in --disk and --remote: all, those requested twice, or those about to be evicted."),
    ] = "all"
    store_window: Annotated[Share, option("With --store write-back: share of memory kept free or stored.")] = 0.1
    metrics: Annotated[
        HostPort,
        option(
            "Address for Prometheus metrics at /metrics; beyond this host only with --metrics-token-file or --keys.",
            default="nowhere",
            section="Metrics and events",
        ),
    ] = ""
    metrics_token_file: Annotated[
        FileName, option("File with a token that clients of --metrics must present (Authorization: Bearer).")
    ] = ""
    events: Annotated[
        Address, option("Address (ipc or tcp) to publish block events on, in vLLM's format.", default="nowhere")
    ] = ""
    events_replay: Annotated[Address, option("Address for requests of missed --events.", default="nowhere")] = ""
    events_topic: Annotated[Topic, option("Topic of --events.")] = ""
    events_hashes: Annotated[
        HashForm, option("Block names in --events: 64 bits of the engine's hash (vLLM's default), or 16 bytes.")
    ] = "int"
    events_media: Annotated[
        MediaForm, option("Tier names in --events: GPU, CPU and STORAGE as in vLLM, or PDX's own names.")
    ] = "vllm"
    events_open: Annotated[
        bool, option("Serve --events to other hosts without keys: anyone who connects learns which blocks are where.")
    ] = False
    name: Annotated[
        Name,
        option(
            "Name for peers and the proxy.",
            default="made from host and address",
            section="Peers and channels",
            for_engines=False,
        ),
    ] = ""
    listen: Annotated[Address, option("Address for peers: ipc or tcp.", default="a socket on this host")] = ""
    discover: Annotated[
        Where,
        option(
            "Where to find addresses missing in --roster: kubernetes:SERVICE[.NAMESPACE] or etcd:URL/PREFIX.",
            default="nowhere",
        ),
    ] = ""
    channels: Annotated[
        SchemeNames,
        option(
            "Channel to peers; repeatable: the first that works.",
            flag="channel",
            name="channels",
            default="the fastest; pdx doctor lists them",
        ),
    ] = []
    wire_codec: Annotated[CodecChoice, option("Compress data to peers over tcp, without loss.")] = "none"
    digests: Annotated[DigestChoice, option("Verify data from peers: over a wire, always, or never.")] = "wire"
    keys: Annotated[
        FileName, option("Secret key made by pdx keygen; needed beyond this host.", default="none", section="Trust")
    ] = ""
    roster: Annotated[FileName, option("File with the names, addresses and public keys of nodes.", default="none")] = ""
    trusted_network: Annotated[
        bool,
        option("Also allow channels without authentication (nixl, ucx): everyone who can reach this host may write."),
    ] = False
    grant_s: PositiveSeconds = 5.0  # a push waits this long for room at its receiver
    push_s: PositiveSeconds = 60.0  # time limit of a push
    peer_timeout_s: PositiveSeconds = 5.0  # a peer that was silent for so long is lost
    group_bytes: Annotated[int, Meta(ge=1, le=1 << 32)] = 1 << 20  # layers are grouped until a write has so much
    window_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 32 << 20  # unacknowledged bytes per peer
    peer_share: Share = 0.5  # of the arena, that one peer may be writing at a time
    report_s: PositiveSeconds = 1.0  # between two reports to the proxy
    max_lease_s: PositiveSeconds = 120.0  # longest lease a client may ask for
    reserve_s: PositiveSeconds = 600.0  # a reservation not sealed by then is aborted
    trace: FileName = ""  # folder for spans, see pdx.telemetry.trace; empty: PDX_TRACE, else nowhere


def is_tier_name(name: str) -> bool:
    """Whether this is the name of a tier; nodes may not have such names, so that names are unambiguous."""
    return name in ("host", "gpu", "arenas", "disk", "remote") or name.startswith("disk ")


def is_name(name: str) -> bool:
    """Whether a node or a controller can have this name: it is shown in tables, and used in NODE/TIER."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, where: str) -> None:
    """:raises ConfigError: no node or controller can have this name, which was given at `where`."""
    if not is_name(name):
        text = f"{where}: a name has 1 to 256 characters, no space, / or control character among them"
        raise ConfigError(f"{text}, and not {name!r:.80}")


def disk_names(config: NodeConfig) -> list[str]:
    """The names of the node's disk tiers.

    :raises ConfigError: one is too long for a name, or not printable.
    """
    if len(config.disks) == 1:
        return ["disk"]
    names = [f"disk {folder}" for folder in config.disks]
    for name in names:
        if len(name) > 256 or not name.isprintable():
            what = "of several has a path of at most 251 characters, all of which can be printed"
            raise ConfigError(f"--disk {name[5:]!r:.300}: a disk {what}")
    return names


def node_name(config: NodeConfig) -> str:
    """The node's name for its peers and its proxy.

    :raises ConfigError: it is the name of a tier, or not a valid name.
    """
    if is_tier_name(config.name):
        raise ConfigError(f"a node cannot be named {config.name!r}, as a tier of every node is; give it another --name")
    if config.name:
        check_name(config.name, "--name")
        return config.name
    digest = hashlib.blake2b(config.address.encode(), digest_size=4).hexdigest()
    return f"{socket.gethostname()[:200]}-{digest}"


def listen_address(config: NodeConfig) -> str:
    """The address to which the node's peers connect."""
    return config.listen or f"{config.address}.peers"


def handover_path(address: str, arena: int = 0) -> Path:
    """The socket on which a node hands over the GPU memory of an arena."""
    return Path(f"{socket_path(address)}.gpu{arena or ''}")


def from_words(kind: type, said: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `kind` from user input, by `Option.name`.

    :raises ConfigError: an unknown name, a wrong type, or a value out of range.
    """
    known = options_of(kind)
    settings: dict[str, Any] = {}
    for name, value in said.items():
        if name not in known:
            raise ConfigError(f"{name!r} is no option of {kind.__name__}; there are {', '.join(known)}")
        if name == "arena" and value == "":
            continue  # explicitly unset, because its default depends on GPUs
        settings[known[name].field.name] = _value(known[name], value)
    return settings


def node_settings(said: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `NodeConfig` from the options given to a command or a connector.

    The first arena is in host memory if there is no GPU, or if its size is given.

    :raises ConfigError: see `from_words`; or a GPU or folder is named twice, or replay is set without events.
    """
    settings = from_words(NodeConfig, said)
    for name, what in (("disks", "--disk: each folder has its own part"), ("more_gpus", "--gpu: a GPU has one arena")):
        named = settings.get(name, [])
        if len(set(named)) != len(named):
            raise ConfigError(f"{what}; name each once, and not {', '.join(named)}")
    if settings.get("events_replay") and not settings.get("events"):
        raise ConfigError("--events-replay answers who has missed what --events publishes; name that, too")
    if "arena_bytes" not in settings and settings.get("more_gpus"):
        first, *more = settings["more_gpus"]
        nbytes = settings.get("gpu_arena_bytes", NodeConfig(address="").gpu_arena_bytes)
        settings |= {"arena_bytes": nbytes, "gpu": first, "more_gpus": more}
    return settings


def _value(option: Option, said: Any) -> Any:
    """:raises ConfigError: the value has a wrong type, or is out of range."""
    value = parse_bytes(said) if option.is_size else said
    if isinstance(option.kind, msgspec.inspect.ListType) and isinstance(said, str):
        value = ([word.strip() for word in said.split(",")] if option.metavar == "WHICH" else [said]) if said else []
    if option.metavar == "FOLDER" and isinstance(value, list):
        value = [each for each in value if each != ""]  # from an unset variable
    try:
        value = msgspec.convert(value, option.field.type)
    except msgspec.ValidationError as error:
        what = " or ".join(", ".join(option.choices).rsplit(", ", 1)) or error
        raise ConfigError(f"{option.name}: {what}, and not {said!r:.80}") from error
    if not option.for_engines or option.metavar not in ("FILE", "FOLDER"):  # the node may run elsewhere
        return value
    return [os.path.abspath(each) for each in value] if isinstance(value, list) else value and os.path.abspath(value)


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of `PdxConnector`; the same for every role."""

    node: Annotated[
        str, option("The node to attach to: ipc:///absolute/path.", default="PDX_NODE, else this user's")
    ] = ""
    start_node: Annotated[bool, option("If no node is running, start one, with the node settings below.")] = True
    proxy: Annotated[
        str, option("Address of the proxy for a node that this engine starts.", default="PDX_PROXY, else this user's")
    ] = ""
    chunk_tokens: Annotated[
        int,
        Meta(ge=16, le=65_536),
        option("Tokens per chunk, a multiple of the block size; the same for all engines."),
    ] = 256
    shards: Annotated[
        int,
        Meta(ge=0, le=1024),
        option(
            "Number of parts that a chunk's KV heads are divided into. Engines of different tensor parallel sizes "
            "share chunks if all set the same number, which each size must divide.",
            default="one for each rank",
        ),
    ] = 0
    stages: Annotated[
        int | str,
        option(
            "Parts that the model's layers are divided into: their number, or the layers of each, as in 12,20. Engines "
            "of different pipeline parallel sizes share chunks if all set the same, and each stage is of whole parts.",
            default="one for each stage",
        ),
    ] = 0
    save: Annotated[bool, option("Store chunks. Without this, an engine cannot prefill for another.")] = True
    save_decode: Annotated[bool, option("Also store generated tokens' chunks.")] = True
    load: Annotated[
        Literal["auto", "always"],
        option("`auto`: while other requests run, load a hit only if that is faster than computing it."),
    ] = "auto"
    moved: Annotated[bool, option("Send token ids to the node, for the hint `reuse: moved`.")] = False
    any_release: Annotated[bool, option("Also run with vLLM releases that PDX was not tested with.")] = False
    role: Annotated[Literal["prefill", "decode", "both"], option("Reported to the proxy; no effect here.")] = "both"
    url: Annotated[
        str, option("This engine's URL, for the proxy; empty: the proxy's --prefill and --decode name it.")
    ] = ""
    lookup_s: Annotated[PositiveSeconds, option("Time limit of a lookup; then it is a miss.")] = 1.0
    reserve_wait_s: Annotated[
        PositiveSeconds, option("How long a prefill waits for room for a transfer; then it sends what fits.")
    ] = 5.0
    transfer_wait_s: Annotated[
        PositiveSeconds, option("How long a decode waits for its transfer; then it computes the rest.")
    ] = 30.0
    lease_s: Annotated[PositiveSeconds, option("How long chunks that were found are held.")] = 60.0
    trace: Annotated[FileName, option("Private folder (mode 0700) for spans.", default="PDX_TRACE, else none")] = ""
    of_node: dict[str, Any] = {}  # settings of `NodeConfig` for a node that this engine starts

    def node_address(self) -> str:
        return self.node or default_node()


def parse(kind: type[_T], settings: dict[str, Any], names: Iterable[str] = ()) -> _T:
    """`settings` as a `kind`. `names`: those that users may set, if not all fields.

    :raises ConfigError: an unknown name, a wrong type, or a value out of range; the message names it.
    """
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(names or [field.name for field in msgspec.structs.fields(kind)])  # type: ignore[arg-type]
        raise ConfigError(f"{error} (settings of {kind.__name__}: {known})") from error


def connector_config(settings: Mapping[str, Any]) -> ConnectorConfig:
    """The settings in `kv_connector_extra_config`, of the connector and of a node that it starts.

    :raises ConfigError: see `parse` and `node_settings`.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"kv_connector_extra_config is a table of settings, and not {settings!r:.80}")
    if "of_node" in settings:
        raise ConfigError("'of_node' is no setting of the connector; say what is in it by itself")
    of_nodes = [name for name, option in options_of(NodeConfig).items() if option.for_engines]
    of_node = node_settings({name: value for name, value in settings.items() if name in of_nodes})
    own = {name: value for name, value in settings.items() if name not in of_nodes}
    names = [each.field.name for each in options_of(ConnectorConfig).values()]
    return parse(ConnectorConfig, {**own, "of_node": of_node}, [*names, *of_nodes])
