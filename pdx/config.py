"""Settings of the node and of the connector: typed, bounded, unknown names refused.

A setting comes from the command line or the connector's `kv_connector_extra_config`; where neither names the
node, the environment variable PDX_NODE does, else the host's default socket; PDX_TRACE stands in for `trace` likewise.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pdx.errors import ConfigError
from pdx.transports.channel import SchemeName

_T = TypeVar("_T")

LEAST_S, MOST_S = 0.001, 86_400.0
PositiveSeconds = Annotated[float, Meta(ge=LEAST_S, le=MOST_S)]
Address = Annotated[str, Meta(max_length=256)]  # as messages have it
FolderName = Annotated[str, Meta(max_length=4096)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]
ShareOrNone = Annotated[float, Meta(ge=0.0, le=1.0)]
EventsAddress = Annotated[str, Meta(max_length=256)]
HashForm = Literal["int", "bytes"]
StoreChoice = Literal["all", "twice-seen", "write-back"]
CodecChoice = Literal["none", "lossless"]
NumaChoice = Annotated[str, Meta(pattern=r"^(auto|none|[0-9]{1,4})\Z")]
_NAME = re.compile(r"[^\s/\x00-\x1f\x7f-\x9f]{1,256}")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def runtime_folder() -> Path:
    """This user's private folder for sockets and locks; created with mode 0700.

    :raises ConfigError: it exists but belongs to somebody else or others may enter it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "pdx" if base else Path(tempfile.gettempdir()) / f"pdx-{os.getuid()}"
    private_folder(folder)
    return folder


def private_folder(folder: Path) -> None:
    """Create `folder` for this user alone, or check that it already is so.

    :raises ConfigError: it belongs to somebody else or others may enter it, it is a link, or it cannot be made.
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


def trace_folder(setting: str) -> Path | None:
    """Where spans are recorded (`pdx.telemetry.trace`): the setting, else PDX_TRACE, else nowhere.

    :raises ConfigError: there is no such folder, or others may enter it.
    """
    name = setting or os.environ.get("PDX_TRACE", "")
    if not name:
        return None
    check_trace_folder(Path(name))
    return Path(name)


def check_trace_folder(folder: Path) -> None:
    """:raises ConfigError: there is no such folder, or others may enter it."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} for spans; make one: mkdir -m 700 {folder}")
    private_folder(folder)


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
    if match is None:
        raise ConfigError(f"{str(text)!r:.80} is not a size; write for example 4GiB, 512M or 1073741824")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `pdx node`."""

    address: str
    arena_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 46)] = 4 << 30
    gpu: Annotated[str, Meta(max_length=64)] = ""  # ordinal or UUID of the GPU that has the arena; empty: host memory
    more_gpus: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=32)] = []  # with an arena besides
    gpu_arena_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 46)] = 4 << 30  # of each of those
    disks: Annotated[list[FolderName], Meta(max_length=32)] = []  # folders with chunks as files, each with its part
    disk_limit_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] = 100 << 30  # of the files in each of them
    disk_reserve_bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 1 << 30  # of those disks are left to others, each
    disk_codec: CodecChoice = "none"  # by which chunks are encoded there, see pdx.store.codecs
    remote: Annotated[str, Meta(max_length=1024)] = ""  # address of a store that nodes share; empty: none
    remote_codec: CodecChoice = "none"
    remote_ttl_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0  # what is older is not found there; 0: never too old
    remote_ca: Annotated[str, Meta(max_length=4096)] = ""  # file of certificates that sign its own; empty: the system's
    remote_credentials: Annotated[str, Meta(max_length=4096)] = ""  # file; empty: the environment has them
    remote_s: PositiveSeconds = 5.0  # a call to it that takes longer has failed …
    remote_lookup_s: PositiveSeconds = 0.25  # … and a question whether chunks are there
    store: StoreChoice = "all"  # what is kept in the tiers below, and when: see pdx.store.storing
    store_window: Share = 0.1  # of each arena: with write-back so much is free or stored
    policy: Annotated[str, Meta(max_length=256)] = "lru"  # which chunks go first, see pdx.store.policies.by_name
    salt_quota: Share = 1.0  # of each arena: so much chunks of one cache salt keep against others
    numa: NumaChoice = "auto"  # node for memory and threads; auto: that of the GPU, none, or a number
    proxy: Address = ""  # where to report engines and timelines; empty: nowhere
    name: str = ""  # told to peers and the proxy; empty: the host's name and a digest of `address`
    listen: Address = ""  # where peers connect: ipc or tcp; empty: a socket beside `address`, for peers on this host
    roster: str = ""  # file that names the peers, with their addresses and public keys
    keys: str = ""  # this node's secret key file, made by `pdx keygen`; needed beyond this host
    channels: Annotated[list[SchemeName], Meta(max_length=32)] = []  # to use, the first that works; empty: the fastest
    trusted_network: bool = False  # choose also among channels by which whoever reaches this host's ports may write
    wire_codec: CodecChoice = "none"  # by which channels encode that can (tcp), for peers that decode it
    digests: Literal["wire", "always", "never"] = "wire"  # which slices are checked: those that leave the host's memory
    grant_s: PositiveSeconds = 5.0  # a push waits this long for room at its receiver
    push_s: PositiveSeconds = 60.0  # a push that is not over by then is dropped
    fetch_s: PositiveSeconds = 5.0  # a lookup waits this long for what a peer is asked for
    peer_timeout_s: PositiveSeconds = 5.0  # a peer that was silent for so long is lost
    group_bytes: Annotated[int, Meta(ge=1, le=1 << 32)] = 1 << 20  # layers are sent together until a write has so much
    window_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 40)] = 32 << 20  # written to a peer and not acknowledged
    peer_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5  # of the arena that one peer may be writing at a time
    pin_share: ShareOrNone = 0.8  # of the arenas that pins, and tenants' leases, may keep from being evicted
    tenant_lease_share: ShareOrNone = 0.1  # of each arena that the leases of one tenant may keep (`Hints.lease_s`) …
    lease_max_s: PositiveSeconds = 600.0  # … each for so long
    metrics: Annotated[str, Meta(max_length=256)] = ""  # HOST:PORT for Prometheus; empty: nowhere
    events: EventsAddress = ""  # where changes of chunks are published, as vLLM does; empty: nowhere …
    events_replay: EventsAddress = ""  # … and where who has missed some asks for them
    events_topic: Annotated[str, Meta(max_length=256)] = ""  # of what is published
    events_hashes: HashForm = "int"  # how blocks are named there, see pdx.wire.kv_events
    events_open: bool = False  # readers on other hosts need no keys
    report_s: PositiveSeconds = 1.0
    max_lease_s: PositiveSeconds = 120.0  # longest lease a client may ask for
    reserve_s: PositiveSeconds = 600.0  # a reservation not sealed by then is aborted
    exit_when_idle_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0  # 0: never
    trace: Annotated[str, Meta(max_length=4096)] = (
        ""  # folder for spans, see pdx.telemetry.trace; empty: PDX_TRACE, else nowhere
    )


def is_tier_name(name: str) -> bool:
    """Whether a tier of a node has this name; then no node has it, so that people can tell what is meant."""
    return name in ("host", "gpu", "arenas", "disk", "remote") or name.startswith("disk ")


def is_name(name: str) -> bool:
    """Whether a node or a controller can have this name: it is shown in tables, and said as NODE/TIER."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, where: str) -> None:
    """:raises ConfigError: no node or controller can have this name, which is said there."""
    if not is_name(name):
        text = f"{where}: a name has 1 to 256 characters, no space, / or control character among them"
        raise ConfigError(f"{text}, and not {name!r:.80}")


def disk_names(config: NodeConfig) -> list[str]:
    """What the tiers of its disks are called.

    :raises ConfigError: one is too long for a name, or cannot be shown.
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
    """What the node is called by its peers and its proxy.

    :raises ConfigError: a tier is called so, or nothing can be.
    """
    if is_tier_name(config.name):
        raise ConfigError(f"a node cannot be named {config.name!r}, as a tier of every node is; give it another --name")
    if config.name:
        check_name(config.name, "--name")
        return config.name
    digest = hashlib.blake2b(config.address.encode(), digest_size=4).hexdigest()
    return f"{socket.gethostname()[:200]}-{digest}"


def listen_address(config: NodeConfig) -> str:
    """Where the node's peers connect."""
    return config.listen or f"{config.address}.peers"


def handover_path(address: str, arena: int = 0) -> Path:
    """Where a node hands over the GPU memory of an arena."""
    return Path(f"{socket_path(address)}.gpu{arena or ''}")


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every command that starts a node may say of it, in the words of `pdx node`."""

    arena: str | int = ""  # host memory for chunks; empty: 4GiB, none where there are GPUs
    gpus: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=64)]], Meta(max_length=32)
    ] = []  # with an arena each
    gpu_arena: str | int = "4GiB"  # of each GPU
    disk: FolderName | Annotated[list[FolderName], Meta(max_length=32)] = ""  # one or several: NodeConfig.disks …
    disk_limit: str | int = "100GiB"  # … and there, for this and what follows
    disk_reserve: str | int = "1GiB"
    disk_codec: CodecChoice = "none"
    remote: Annotated[str, Meta(max_length=1024)] = ""
    remote_codec: CodecChoice = "none"
    remote_ttl: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    remote_ca: Annotated[str, Meta(max_length=4096)] = ""
    remote_credentials: Annotated[str, Meta(max_length=4096)] = ""
    remote_timeout: PositiveSeconds = 5.0  # NodeConfig.remote_s …
    remote_lookup_timeout: PositiveSeconds = 0.25  # … and remote_lookup_s …
    fetch_timeout: PositiveSeconds = 5.0  # … and fetch_s
    store: StoreChoice = "all"
    store_window: Share = 0.1
    policy: Annotated[str, Meta(max_length=256)] = "lru"
    salt_quota: Share = 1.0
    pin_share: ShareOrNone = 0.8
    tenant_lease_share: ShareOrNone = 0.1
    lease_max_s: PositiveSeconds = 600.0
    numa: NumaChoice = "auto"
    metrics: Annotated[str, Meta(max_length=256)] = ""
    events: EventsAddress = ""
    events_replay: EventsAddress = ""
    events_topic: Annotated[str, Meta(max_length=256)] = ""
    events_hashes: HashForm = "int"
    events_open: bool = False

    def settings(self) -> dict[str, Any]:
        """The settings of `NodeConfig` that say the same. The first arena is the host's, where it has one.

        :raises ConfigError: a size that is none, or a GPU or folder named twice.
        """
        folders = [self.disk] if isinstance(self.disk, str) else self.disk
        disks = [os.path.abspath(folder) for folder in folders if folder]
        if len(set(disks)) != len(disks):
            raise ConfigError(f"--disk {' --disk '.join(disks)}: each folder has its own part; name each once")
        others = {
            "disks": disks,
            "disk_limit_bytes": parse_bytes(self.disk_limit),
            "disk_reserve_bytes": parse_bytes(self.disk_reserve),
            "disk_codec": self.disk_codec,
            "remote": self.remote,
            "remote_codec": self.remote_codec,
            "remote_ttl_s": self.remote_ttl,
            "remote_ca": os.path.abspath(self.remote_ca) if self.remote_ca else "",
            "remote_credentials": os.path.abspath(self.remote_credentials) if self.remote_credentials else "",
            "remote_s": self.remote_timeout,
            "remote_lookup_s": self.remote_lookup_timeout,
            "fetch_s": self.fetch_timeout,
            "store": self.store,
            "store_window": self.store_window,
            "policy": self.policy,
            "salt_quota": self.salt_quota,
            "pin_share": self.pin_share,
            "tenant_lease_share": self.tenant_lease_share,
            "lease_max_s": self.lease_max_s,
            "numa": self.numa,
            "metrics": self.metrics,
            "events": self.events,
            "events_replay": self.events_replay,
            "events_topic": self.events_topic,
            "events_hashes": self.events_hashes,
            "events_open": self.events_open,
        }
        if self.events_replay and not self.events:
            raise ConfigError("--events-replay answers who has missed what --events publishes; name that, too")
        if len(set(self.gpus)) != len(self.gpus):
            raise ConfigError(f"--gpu {' --gpu '.join(self.gpus)}: a GPU has one arena; name each once")
        of_gpus = {"gpu_arena_bytes": parse_bytes(self.gpu_arena), **others}
        if not self.gpus:
            return {"arena_bytes": parse_bytes(self.arena or "4GiB"), **others}
        if self.arena:
            return {"arena_bytes": parse_bytes(self.arena), "more_gpus": list(self.gpus), **of_gpus}
        first, *more = self.gpus
        return {"arena_bytes": of_gpus["gpu_arena_bytes"], "gpu": first, "more_gpus": more, **of_gpus}


class ConnectorConfig(NodeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of `PdxConnector`; the same for every role. `NodeOptions` are of a node that this
    engine starts."""

    node: str = ""  # empty: PDX_NODE, else this host's default socket
    start_node: bool = True  # start a node where none runs
    proxy: str = ""  # told to a node that this engine starts
    chunk_tokens: Annotated[int, Meta(ge=16, le=65_536)] = 256
    save: bool = True  # put prompts into the store
    save_decode: bool = True  # put generated chunks into the store
    load: Literal["auto", "always"] = "auto"  # beside requests that run: what comes sooner than it is computed, or all
    any_release: bool = False  # run with a release of the engine that PDX was not tested with, too
    role: Literal["prefill", "decode", "both"] = "both"  # told to the proxy; decides nothing in the engine
    url: str = ""  # where this engine serves HTTP, told to the proxy
    lookup_s: PositiveSeconds = 1.0  # a node that has not answered by then is a miss
    reserve_wait_s: PositiveSeconds = 5.0  # a prefill for a transfer waits this long for room
    transfer_wait_s: PositiveSeconds = 30.0  # a decode waits this long for its transfer
    lease_s: PositiveSeconds = 60.0
    trace: Annotated[str, Meta(max_length=4096)] = ""  # see NodeConfig

    def node_address(self) -> str:
        """The node this engine attaches to."""
        return self.node or default_node()


def parse(kind: type[_T], settings: dict[str, Any]) -> _T:
    """`settings` as a `kind`.

    :raises ConfigError: an unknown name, a wrong type, or a value out of range; the message names it.
    """
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))  # type: ignore[arg-type]
        raise ConfigError(f"{error} (settings of {kind.__name__}: {known})") from error
