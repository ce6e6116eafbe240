"""The form of vLLM's KV events, held against vLLM's own code: its classes decode what a node publishes, and what its
publisher sends our subscriber reads.

Of vLLM nothing runs but the file of its events, without the imports from the rest of it.
"""

import ast
import contextlib
import importlib.util
import logging
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
import zmq
from events_bed import key
from events_engine import BLOCKS, Engine, ints
from publisher_stage import Stage, step

from pdx.client.events import Subscriber
from pdx.testing.waiting import wait_until
from pdx.wire.kv_events import END_SEQ
from pdx.wire.messages import Delete

RELEASES = Path(__file__).parents[3] / "build" / "releases"  # of `make releases`
STUBS = {"ExternalBlockHash": bytes | int, "KVEventsConfig": SimpleNamespace, "init_logger": logging.getLogger}


@pytest.fixture(params=["installed", "0.33.0"])
def vllm(request, monkeypatch):
    """The events of one release."""
    if request.param == "installed":
        spec = importlib.util.find_spec("vllm")
        if spec is None:
            pytest.skip("vLLM is not installed")
        folder = Path(spec.origin).parent
    else:
        folder = RELEASES / request.param / "vllm"
    path = folder / "distributed" / "kv_events.py"
    if not path.exists():
        pytest.skip(f"build/releases has no vLLM {request.param} (make releases)")
    tree = ast.parse(path.read_text())
    tree.body = [
        each for each in tree.body if not (isinstance(each, ast.ImportFrom) and each.module.startswith("vllm"))
    ]
    module = ModuleType("events_of_vllm")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__.update(STUBS)
    exec(compile(tree, path, "exec"), module.__dict__)  # noqa: S102 - the installed package's own file
    return module


@pytest.fixture
def where(place):
    return {"events": f"ipc://{place}/events.sock", "events_replay": f"ipc://{place}/replay.sock"}


def by_place(vllm, events):
    """Block -> the places where it is, by each event as vLLM's classes have it; no block comes or goes twice."""
    found = {}
    for event in events:
        if isinstance(event, vllm.AllBlocksCleared):
            found.clear()
            continue
        assert event.group_idx == 0
        for block in event.block_hashes:
            here = found.setdefault(block, set())
            is_new = (event.medium, event.locality) not in here
            assert is_new is isinstance(event, vllm.BlockStored)
            (here.add if is_new else here.remove)((event.medium, event.locality))
    return {block: places for block, places in found.items() if places}


def test_vllms_classes_decode_what_a_node_publishes(start_here, attach, place, where, vllm):
    disks = [str(place / "one"), str(place / "other")]
    node = start_here(**where, disks=disks, disk_limit_bytes=64 << 20, events_hashes="int")
    decode = msgspec.msgpack.Decoder(vllm.KVEventBatch).decode
    events = []
    with zmq.Context() as context, context.socket(zmq.SUB) as live, context.socket(zmq.REQ) as replay:
        live.setsockopt(zmq.SUBSCRIBE, b"")
        live.connect(where["events"])
        replay.connect(where["events_replay"])
        replay.send((0).to_bytes(8, "big"))
        _, seq, payload = replay.recv_multipart()  # the node has heard of the subscriber by the next one
        assert decode(payload).events == [vllm.AllBlocksCleared()]

        def heard(places):
            while live.poll(50):
                events.extend(decode(live.recv_multipart()[2]).events)
            return by_place(vllm, events) == dict.fromkeys(ints(blocks), places) if places else by_place(vllm, events)

        keys, blocks = Engine(attach, node).write(3)
        wait_until(lambda: heard({("CPU", "LOCAL"), ("STORAGE", "LOCAL")}))
        first = events[0]
        assert (first.block_hashes, first.parent_block_hash, first.block_size) == (ints(blocks), None, 16)
        assert (first.token_ids, first.kv_cache_spec_kind) == ([], "full_attention")
        assert (first.kv_cache_spec_sliding_window, first.ownership, first.session_id) == (None, None, None)
        attach(node).ask(Delete(keys[1:]))
        wait_until(lambda: heard(None).keys() == set(ints(blocks[:BLOCKS])))


@pytest.fixture
def engine(place, vllm, monkeypatch):
    """vLLM's publisher, and where it publishes and answers."""
    addresses = [f"ipc://{place}/engine.sock", f"ipc://{place}/engine-replay.sock"]
    with zmq.Context() as context:
        monkeypatch.setattr(zmq.Context, "instance", lambda: context)
        publisher = vllm.ZmqEventPublisher(0, *addresses)
        yield publisher, addresses
        publisher.shutdown()
    for path in place.glob("engine*.sock"):
        path.unlink()


def test_our_subscriber_reads_what_vllms_publisher_sends(engine, vllm):
    publisher, addresses = engine

    def stored(blocks, group, kind, medium="GPU", **more):
        said = {"group_idx": group, "kv_cache_spec_kind": kind, **more}
        return vllm.BlockStored(blocks, None, [7] * 16 * len(blocks), 16, None, medium, None, **said)

    whole = stored([1, 2], 0, "full_attention", session_id="chat")
    window = stored([2], 1, "sliding_window", kv_cache_spec_sliding_window=16)
    remote = stored([1], 0, "full_attention", "STORAGE", locality="REMOTE", ownership="kvcr")
    publisher.publish(vllm.KVEventBatch(1.0, [whole, window, remote]))
    with Subscriber(*addresses, check_s=0.3) as subscriber:
        wait_until(lambda: subscriber.poll(0.05) and subscriber.last == 0)
        assert subscriber.index.as_dict() == {1: {"GPU", "STORAGE remote"}, 2: {"GPU"}}
        of_window = vllm.BlockRemoved([2], "GPU", group_idx=1)
        of_remote = vllm.BlockRemoved([1], "STORAGE", group_idx=0, locality="REMOTE", ownership="kvcr")
        publisher.publish(vllm.KVEventBatch(2.0, [of_window, of_remote]))
        wait_until(lambda: subscriber.poll(0.05) and subscriber.last == 1)
        assert subscriber.leading([1, 2]) == {"GPU": 2}
        assert not subscriber.counters["malformed"]


class PlainReader:
    """The logic of vLLM's example: a gap is asked for, and what is answered taken in, then the message behind it."""

    def __init__(self, context, stage, decoder):
        self.sub, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.sub.connect(stage.address)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, "")
        self.replay.connect(stage.replay)
        self.decoder, self.last_seq, self.where = decoder, -1, {}

    def take(self, seq, payload):
        for event in self.decoder.decode(payload).events:
            match type(event).__name__:
                case "AllBlocksCleared":
                    self.where.clear()
                case "BlockStored":
                    for block in event.block_hashes:
                        self.where.setdefault(block, set()).add(event.medium)
                case "BlockRemoved":
                    for block in event.block_hashes:
                        self.where.get(block, set()).discard(event.medium)
        self.last_seq = max(seq, self.last_seq)

    def heard(self, *, loses=False):
        if not self.sub.poll(10):
            return False
        _, seq_bytes, payload = self.sub.recv_multipart()
        seq = int.from_bytes(seq_bytes, "big")
        if not loses and 0 <= self.last_seq < seq - 1:
            self.replay.send_multipart([b"", (self.last_seq + 1).to_bytes(8, "big")])
            while self.replay.poll(5000):
                _, _, replay_seq, replayed = self.replay.recv_multipart()
                if not replayed:
                    assert replay_seq == END_SEQ
                    break
                if int.from_bytes(replay_seq, "big") > self.last_seq:
                    self.take(int.from_bytes(replay_seq, "big"), replayed)
        if not loses:
            self.take(seq, payload)
        return True

    def known(self):
        return {block: tiers for block, tiers in self.where.items() if tiers}


@pytest.mark.parametrize("kept", [2, 1000])
def test_the_logic_of_vllms_example_reads_our_stream(place, vllm, kept):
    stage = Stage(place, max_kept=kept)
    with zmq.Context() as context, contextlib.closing(stage):
        reader = PlainReader(context, stage, msgspec.msgpack.Decoder(type=vllm.KVEventBatch))
        rng = random.Random(7)
        wait_until(lambda: step(stage, rng) or stage.turn() or reader.heard(), what="it subscribes")
        for _ in range(100):
            step(stage, rng)
            stage.turn()
            reader.heard(loses=rng.random() < 0.2)
        for number in range(3):  # the last one is not lost
            stage.bed.disk.put(key(number))
            stage.put(number)
            stage.turn()
        wait_until(lambda: not reader.heard() and reader.known() == stage.blocks())
        context.destroy(linger=0)
