"""Turns the options of `pdx sim`, under the names that the command gives them, into traces and a case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdx.bench.plan.machines import Assumptions, Engine, find_gpu, host_bytes_s, speeds_of
from pdx.bench.plan.shapes import find_model
from pdx.bench.plan.units import parse_count, parse_rate, parse_time
from pdx.bench.sim.engine import Settings
from pdx.bench.sim.replay import BELADY
from pdx.bench.sim.requests import Trace, read
from pdx.bench.sim.sessions import Conversations, generate
from pdx.bench.sim.simulation import Case, Prices
from pdx.bench.sim.tier import Device
from pdx.config import parse_bytes
from pdx.errors import ConfigError
from pdx.proxy.config import Routing
from pdx.store.policies import by_name


def traces_of(paths: Sequence[Path], options: Any) -> list[Trace]:
    """Read or generate traces. :raises ConfigError: none or both are asked for, or a file is not a trace."""
    if bool(paths) == bool(options.sessions):
        raise ConfigError("give the files of traces, or --sessions with how many to generate")
    found = [read(path) for path in paths]
    if options.sessions:
        conversations = Conversations(
            sessions=options.sessions,
            rate=options.session_rate,
            think_s=parse_time(options.think),
            window=parse_count(options.window),
            moves=options.moves,
            block_tokens=parse_count(options.block),
            seed=options.seed,
        )
        if conversations.window < 4 * conversations.block_tokens:
            raise ConfigError(f"--window {options.window} has no room for four blocks of {options.block} tokens")
        found.append(generate(conversations))
    return [_at_rate(trace, options.rate) for trace in found]


def _at_rate(trace: Trace, rate: float) -> Trace:
    """The same requests at a mean rate per second; 0: unchanged."""
    if not rate or not trace.seconds:
        return trace
    first, scale = trace.requests[0].at_s, len(trace.requests) / rate / trace.seconds
    moved = [msgspec.structs.replace(each, at_s=(each.at_s - first) * scale) for each in trace.requests]
    return msgspec.structs.replace(trace, requests=moved)


def case_of(options: Any) -> Case:
    """:raises ConfigError: an option is wrong."""
    gpu, shapes = find_gpu(options.gpu), find_model(options.model)
    assumed = Assumptions(
        mfu=options.mfu, mbu=options.mbu, link_share=options.link_share, step_s=parse_time(options.step)
    )
    model = Engine(shapes, speeds_of(gpu, assumed, options.tp, shapes.weight_bytes), options.tp)
    if not model.kv_room_tokens:
        raise ConfigError(f"the weights of {shapes.name} do not fit into {options.tp} x {gpu.name}: give a larger --tp")
    policy = policy_of(options)
    by_name.find(options.disk_policy, option="--disk-policy")
    return Case(
        model=model,
        nodes=options.nodes,
        engines=options.engines,
        routing=Routing(options.routing),
        peer_bytes_s=parse_rate(options.peer_speed) if options.peer_speed else 0.0,
        settings=Settings(
            batch=options.batch,
            host_bytes_s=host_bytes_s(gpu, assumed, options.tp),
            looks_ahead=options.look_ahead,
            early=options.early,
        ),
        host_bytes=parse_bytes(options.host),
        devices=[
            _device(kind, room, speed, latency)
            for kind, room, speed, latency in (
                ("disk", options.disk, options.disk_speed, options.disk_latency),
                ("remote", options.remote, options.remote_speed, options.remote_latency),
            )
            if room
        ],
        policy=policy,
        disk_policy=options.disk_policy,
        store=options.store,
        window=options.store_window,
        queue=options.queue_depth,
        warm_up=options.warm_up,
        pays=not options.any_load,
        prices=Prices(
            gpu=options.gpu_price,
            host_gb=options.host_price,
            disk_gb=options.disk_price,
            remote_gb=options.remote_price,
        ),
    )


def policy_of(options: Any) -> str:
    """The eviction policy of memory. :raises ConfigError: no policy has this name."""
    if options.policy != BELADY:
        by_name.find(options.policy)
    return str(options.policy)


def seconds_of(text: str) -> float:
    """Parse a time, also in minutes or hours: 90s, 30m, 1h. :raises ConfigError: it is not a time."""
    for unit, seconds in (("h", 3600.0), ("m", 60.0)):
        if text.endswith(unit) and text[:-1].replace(".", "", 1).isdigit():
            return float(text[:-1]) * seconds
    return parse_time(text)


def _device(kind: str, room: str, speed: str, latency: str) -> Device:
    load, _, store = speed.partition(",")
    return Device(
        name=kind,
        kind=kind,
        room_bytes=parse_bytes(room),
        load_bytes_s=parse_rate(load),
        store_bytes_s=parse_rate(store or load),
        latency_s=parse_time(latency),
    )
