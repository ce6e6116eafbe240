"""All metrics by name, with their texts for Prometheus and for the table in `docs/metrics.md`.

A node counts under short names (`Env.counters`); `of_counter` says to which metric such a name belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]

# Seconds; few, because each is one more series for every histogram and each of its labels.
STEPS_S = (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 5.0, 30.0)  # for steps inside a node
TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)
TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
REQUEST_S = (*TTFT_S, 300.0, 600.0, 3600.0)


class Named(NamedTuple):
    """A metric. A counter's series have `_total` after its name."""

    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# Counters without labels; each is `pdx_node_NAME_total`.
_COUNTED = {
    "aborted": "Chunks given up before they were whole.",
    "advised": "Pieces of advice about sessions taken.",
    "answers_dropped": "Answers that an engine or a peer did not read, or that nobody had asked for.",
    "arrivals": "Requests announced by the proxy whose chunks were looked for ahead.",
    "channels_broken": "Channels to peers that failed in use.",
    "channels_stepped_down": "Channels chosen in place of a faster one that should work there.",
    "channels_unavailable": "Channels named by --channel that do not work here.",
    "chunks_expired": "Chunks removed because the eviction policy's time was over.",
    "copies": "Copies begun: loads, stores and pushes.",
    "copies_cancelled": "Copies ended with their transfer.",
    "copies_late": "Copies given up at their deadline.",
    "copies_lost": "Copies ended with the connection to their peer.",
    "copies_stopped": "Copies that the tier or the peer ended.",
    "copies_without_source": "Copies ended because their chunks will not be filled.",
    "deaths": "Attached processes that died.",
    "demoted_chunks": "Chunks moved out of memory by hint.",
    "demotions_given_up": "Chunks hinted out of memory that no tier took.",
    "descriptors_short": "Times that new connections were kept out for lack of descriptors.",
    "digest_mismatches": "Slices from peers with a wrong digest.",
    "discovery_failures": "Times that --discover was not answered; all stay where they were found last.",
    "early_answers": "Requests answered before their transfer was whole.",
    "engine_layouts_differ": "Engines that share no chunks with others of their model.",
    "events": "Changes of chunks noted for --events and the proxy.",
    "events_published": "Batches published by --events.",
    "events_replayed": "Batches told again at --events-replay.",
    "events_seq": "Number of the last batch.",
    "events_snapshots": "Snapshots told at --events-replay.",
    "evicted": "Chunks evicted from memory.",
    "evicted_unstored": "Chunks evicted from memory that no tier had.",
    "expected_too_many": "Requests to come that were not prepared: too many are expected.",
    "fetch_impossible": "Fetches from a peer that cannot be asked.",
    "fetches_late": "Fetches from peers given up at their deadline.",
    "fetches_not_worth": "Chunks not fetched from a peer: to compute them was faster.",
    "granted_chunks": "Chunks of copies that tiers had room for.",
    "granted_in_part": "Pushes from peers that there was no room for as a whole.",
    "handover_refused": "GPU arenas not handed to a process.",
    "handovers": "GPU arenas handed to a process.",
    "hellos_missing": "Peers turned away: they did not introduce themselves.",
    "hit_chunks": "Chunks found for requests.",
    "internal_errors": "Exceptions that nobody expected: defects.",
    "jobs_failed": "Parts of copies that failed.",
    "landed_bytes": "Bytes received from peers.",
    "landings_late": "Pushes from peers given up at their deadline.",
    "leases_expired": "Leases that ran out.",
    "loads_cut": "Chunks not loaded: they would not have come within --fetch-timeout.",
    "loads_from_slow_tiers": "Loads begun on a tier that was late before.",
    "loads_not_worth": "Chunks not loaded from a tier: to compute them was faster.",
    "loads_without_room": "Loads cut for lack of memory.",
    "looked_up_chunks": "Chunks that requests looked for.",
    "lookups": "Requests that looked for chunks.",
    "messages_dropped": "Messages that made no sense.",
    "moved_tokens": "Tokens whose KV was found at another position.",
    "moves_failed": "Chunks that a controller's verb could not move.",
    "notifications_dropped": "Notifications over channels that made no sense.",
    "offered_chunks": "Chunks of copies that tiers were asked to take.",
    "offers": "Pushes that peers offered.",
    "offers_stopped": "Pushes from peers refused: too many at once.",
    "page_lock_refused": "Arenas not page-locked: copies to GPUs are slow.",
    "part_hit_blocks": "Blocks found in chunks that were hits in part.",
    "peer_layouts_differ": "Peers' chunks that no engine here can read.",
    "peer_lookups": "Questions to peers what they have of a prompt.",
    "peer_lookups_late": "Of these, those not answered in time.",
    "peers_denied": "Connections of peers without the right key.",
    "peers_lost": "Connections to peers that were lost.",
    "peers_refused": "Peers turned down.",
    "pins_refused": "Pins refused: too much would be pinned.",
    "prefetched_chunks": "Chunks loaded ahead of a request.",
    "prefetches_cancelled": "Loads ahead that were given up.",
    "push_impossible": "Pushes to a peer that cannot be reached.",
    "refused": "Messages refused, with the reason told.",
    "replies_dropped": "Answers to the proxy's verbs that were not sent.",
    "reports_dropped": "Reports to the proxy that were not sent.",
    "reread_failed": "Changes of the roster or the key file that were wrong: what was there before counts on.",
    "reserve_full": "Reservations cut for lack of memory.",
    "sealed": "Chunks that became whole.",
    "stores_dropped": "Chunks not stored below memory: the tier did not keep up.",
    "strangers_dropped": "Connections ended before they showed a key.",
    "tenant_leases_expired": "Leases of tenants (hint lease_s) that ran out.",
    "transfers_crowded_out": "Transfers forgotten: their source made too many known.",
    "transfers_given_up": "Transfers given up.",
    "ttl_deleted": "Chunks deleted because their hinted time was over.",
    "verbs": "Verbs of controllers.",
    "wants_limited": "Fetches of peers served in part: they asked for too much at once.",
    "wants_served": "Fetches of peers served.",
    "written_twice": "Pushes that wrote where they had written before.",
}
_GAUGES = {
    "uptime_seconds": ("Seconds since the node started.",),
    "arena_bytes": ("Bytes of the arenas.",),
    "free_bytes": ("Bytes of the arenas that no chunk has.",),
    "chunks": ("Chunks in the arenas, each shard counted.", "state"),
    "chunk_bytes": ("Bytes of the chunks in the arenas.", "state"),
    "leases": ("Leases that engines and clients hold.",),
    "pins": ("Chunks in the arenas that are pinned.",),
    "pinned_bytes": ("Bytes of the chunks in the arenas that are pinned.",),
    "transfers": ("Transfers between engines under way.",),
    "attached": ("Attached processes.", "kind"),
    "mapped": ("Blocks of device memory that the node's process has mapped.",),
    "peer_up": ("1: the connection to the peer is up.", "peer"),
    "peer_pushes": ("Pushes to the peer under way.", "peer"),
    "peer_landing": ("Pushes from the peer under way.", "peer"),
    "tier_up": ("1: the tier answers.", "tier"),
    "tier_chunks": ("Chunks in the tier, each shard counted.", "tier"),
    "tier_used_bytes": ("Bytes in the tier, with what is being written or removed.", "tier"),
    "tier_limit_bytes": ("Bytes that the tier may have.", "tier"),
    "tier_copies": ("Copies to and from the tier under way, or waiting.", "tier"),
    "tier_load_bytes_per_second": ("Rate of loads as last measured; 0: not yet.", "tier"),
    "tier_store_bytes_per_second": ("Rate of stores as last measured; 0: not yet.", "tier"),
}
_LABELLED = {
    "degraded": ("What engines did without PDX.", "reason"),
    "hints": ("Hints that were not taken as they are.", "outcome"),
    "copied_bytes": ("Bytes that copies moved.", "kind", "direction"),
    "copied_seconds": ("Time in which parts of copies moved them, added up.", "kind", "direction"),
    "tier_events": ("What happened at tiers of one kind, errors by their reason.", "kind", "event"),
    "peer_sent_bytes": ("Bytes sent to the peer.", "peer"),
    "peer_landed_bytes": ("Bytes received from the peer.", "peer"),
    "tier_hits": ("Chunks that a request found, for the first time since they came from the tier.", "tier"),
    "tier_misses": ("First chunks that a request lacked, or got from a tier below.", "tier"),
    "tier_loads": ("Chunks that were loaded, each shard counted.", "tier"),
    "tier_stores": ("Chunks that were stored, each shard counted.", "tier"),
    "tier_loaded_bytes": ("Bytes of the chunks that were loaded.", "tier"),
    "tier_stored_bytes": ("Bytes of the chunks that were stored.", "tier"),
    "tier_dropped": ("Chunks that were not stored: the tier did not keep up, or took none.", "tier"),
    "tier_errors": ("Calls that failed, and what was not the chunk that it should be.", "tier"),
    "tier_read_bytes": ("Bytes read for the loads: fewer where chunks are encoded.", "tier"),
    "tier_written_bytes": ("Bytes written for the stores: fewer where chunks are encoded.", "tier"),
}
_HISTOGRAMS = {
    "admit_seconds": ("From a request's question to its answer, with the wait for what comes.",),
    "copy_seconds": ("From when a copy was asked for to its end, of those done.", "kind", "direction"),
    "handoff_seconds": ("From prefill's end until a push was over; 0: it was over before.",),
}
# In an engine's own /metrics: `vllm:pdx_NAME_total`, with one label of ours after vLLM's, which has these values.
SOURCES = ("memory", "disk", "remote", "peer", "moved")
OF_ENGINES = {
    "hit_tokens": SOURCES,
    "loads": ("loaded", "failed"),
    "copied_bytes": ("load", "save"),
    "copied_seconds": ("load", "save"),
}
_ENGINE: dict[str, tuple[str, ...]] = {
    "hit_tokens": ("Tokens of prompts that PDX had, by where their KV was found.", "source"),
    "loads": ("Requests whose KV was loaded, or not all of it.", "outcome"),
    "copied_bytes": ("Bytes copied into the KV cache and out of it, by all ranks.", "direction"),
    "copied_seconds": ("Time of these copies, added up; of saves on a GPU with what they wait for.", "direction"),
}
_PROXY_COUNTERS = {
    "requests": ("Requests finished; `broken`: an engine died or ended in an error.", "route", "mode", "outcome"),
    "fallbacks": ("Requests that could not be served in the mode planned for them.", "reason"),
    "failovers": ("Legs given to another engine.", "leg", "reason"),
    "exhausted": ("Requests refused for lack of descriptors, ports, buffers or room for bodies.", "lack"),
    "cancels": ("Transfers given up, told to the nodes concerned.", "reason"),
    "stripped": ("Requests whose own transfer parameters were removed.",),
    "unplaced": ("Requests on engines that no node has reported: nothing is pushed for them.",),
    "verbs": ("Verbs of controllers over HTTP; `outcome`: ok, or the error's class.", "verb", "outcome"),
    "reports": ("Node reports taken in.",),
    "engine_failures": ("Legs that failed by an engine's fault.", "reason"),
    "events": ("Connections not served, messages dropped, internal errors.", "event"),
    "control_dropped": ("What nodes said and was not believed or not understood.", "reason"),
}
_PROXY_GAUGES = {
    "engines": ("Engines known.", "role"),
    "waiting": ("Requests that wait for their turn.",),
    "engine_in_flight": ("Legs under way.", "engine", "url"),
    "engine_ready": ("1: it takes requests. 0: it has not answered yet, or is suspect.", "engine", "url"),
}
_PROXY_HISTOGRAMS = {
    "ttft_seconds": ("From a streaming request's arrival to its first token.", "route", "mode"),
    "itl_seconds": ("Between two pieces of a stream; tokens that come together are one piece.", "mode"),
    "request_seconds": ("From a request's arrival to the end of its answer.", "route", "mode"),
    "leg_seconds": (
        "From when a leg was first sent to a prefill engine's whole answer, and to a decode engine's first token.",
        "leg",
    ),
    "handoff_seconds": ("From prefill's end until the decode engine may run, as nodes saw it.",),
}
_PROXY_BUCKETS = {"ttft_seconds": TTFT_S, "itl_seconds": TOKEN_S, "handoff_seconds": STEPS_S}


def _all() -> Iterator[tuple[str, Named]]:
    for name, text in _COUNTED.items():
        yield f"pdx_node_{name}", Named("counter", text)
    kinds: tuple[tuple[str, Kind, dict[str, tuple[str, ...]]], ...] = (
        ("pdx_node_", "counter", _LABELLED),
        ("pdx_node_", "gauge", _GAUGES),
        ("pdx_proxy_", "counter", _PROXY_COUNTERS),
        ("vllm:pdx_", "counter", _ENGINE),
        ("pdx_proxy_", "gauge", _PROXY_GAUGES),
    )
    for prefix, kind, told in kinds:
        for name, (text, *labels) in told.items():
            yield f"{prefix}{name}", Named(kind, text, tuple(labels))
    for name, (text, *labels) in _HISTOGRAMS.items():
        yield f"pdx_node_{name}", Named("histogram", text, tuple(labels), STEPS_S)
    for name, (text, *labels) in _PROXY_HISTOGRAMS.items():
        yield f"pdx_proxy_{name}", Named("histogram", text, tuple(labels), _PROXY_BUCKETS.get(name, REQUEST_S))
    yield "pdx_build_info", Named("gauge", "1, of this version.", ("version", "python"))


METRICS = dict(_all())

# Reasons and events that have a series from the start.
DEGRADED = (
    *("adapter_changed", "arena_on_gpu", "arena_unreachable", "codec_refused", "copies_failed", "drafts_missing"),
    *("hints_refused", "hook_failed", "kernels_unavailable", "launch_refused", "load_failed", "load_late"),
    *("load_not_worth", "message_dropped", "moved_failed", "moved_refused", "naming_failed", "no_node", "no_room"),
    *("page_lock_refused", "request_without_pdx", "save_lost", "save_skipped", "save_spoiled", "seal_refused"),
    *("source_late", "staging_unavailable", "transfer_late", "transfer_refused", "unnamed_adapter", "unnamed_inputs"),
    *("unnamed_media", "unnamed_weights", "untold_adapter"),
)
_OF_BOTH = (
    *("corrupt", "denied", "dropped", "failed", "full", "loaded", "missing", "not_encoded", "outdated", "paused"),
    *("read_only", "removed", "stored", "truncated"),
)
TIER_EVENTS = {
    "disk": (
        *_OF_BOTH,
        *("busy", "cap_lowered", "exhausted", "expired", "foreign", "gone", "index_full", "not_counted", "not_direct"),
        *("pins_dropped", "read_failed", "silent", "too_large", "unfinished", "wanted", "write_failed"),
    ),
    "remote": (
        *_OF_BOTH,
        *("hits", "left_out", "misses", "not_asked", "not_removed", "timeout", "unreachable", "untrusted"),
    ),
}
COPIES = [  # kinds of tiers, and directions
    *(("disk", "load"), ("disk", "store"), ("remote", "load"), ("remote", "store")),
    *(("peer", "store"), ("arenas", "store")),
]
_MOVED = {"loaded_bytes": "load", "stored_bytes": "store", "loaded_ns": "load", "stored_ns": "store"}


def source_of(number: int) -> str:
    """The source of that number in a message; an unknown one counts as memory."""
    return SOURCES[number] if number < len(SOURCES) else SOURCES[0]


def of_counter(name: str) -> tuple[str, tuple[str, ...]]:
    """The metric, and the labels' values, for what a node counts under this name; `…_ns` counts nanoseconds."""
    if name in _COUNTED:
        return f"pdx_node_{name}", ()
    first, _, rest = name.partition("_")
    if first in ("degraded", "hints"):
        return f"pdx_node_{first}", (rest,)
    if rest in _MOVED:
        return f"pdx_node_copied_{'seconds' if rest.endswith('_ns') else 'bytes'}", (first, _MOVED[rest])
    return "pdx_node_tier_events", (first, rest)


def table(prefix: str, names: Iterable[str] = METRICS) -> str:
    """The metrics whose names begin with `prefix`, as Markdown for `docs/metrics.md`."""
    rows = []
    for name in (name for name in names if name.startswith(prefix)):
        kind, text, labels, _ = METRICS[name]
        shown = f"`{name}_total`" if kind == "counter" else f"`{name}`"
        about = ", ".join([*([] if kind == "counter" else [kind]), *(f"`{label}`" for label in labels)])
        rows.append(f"- {shown} ({about}): {text}" if about else f"- {shown}: {text}")
    return "\n".join(rows)
