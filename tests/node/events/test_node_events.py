"""A real node process: what it publishes, and what a proxy that follows it knows."""

import asyncio

import pytest
import zmq
from events_engine import BLOCKS, Engine, ints
from node_harness import MIB

from pdx.client.events import Subscriber
from pdx.memory.arena import GRANULE_BYTES
from pdx.proxy.chunk_index import ANY, ChunkIndex
from pdx.proxy.control import Control
from pdx.proxy.following import Following
from pdx.telemetry.env import Env
from pdx.testing.waiting import wait_until
from pdx.wire.kv_events import decode_batch
from pdx.wire.messages import Admit, Delete, Fill
from pdx.wire.proxy import NodeReport


@pytest.fixture
def where(place):
    return {"events": f"ipc://{place}/events.sock", "events_replay": f"ipc://{place}/replay.sock"}


def test_a_subscriber_knows_what_is_where_while_nodes_come_and_go(start_node, attach, place, where):
    settings = {**where, "disks": [str(place / "disk")], "disk_limit_bytes": 64 * MIB}
    node = start_node(**settings)
    with Subscriber(*where.values(), check_s=0.3) as subscriber:
        keys, blocks = Engine(attach, node).write(3)
        full = {"CPU": 12, "STORAGE": 12}
        wait_until(lambda: subscriber.poll(0.05) and subscriber.leading(ints(blocks)) == full)
        attach(node).ask(Delete(keys[1:]))
        wait_until(lambda: subscriber.poll(0.05) and subscriber.leading(ints(blocks)) == {"CPU": 4, "STORAGE": 4})
        wait_until(lambda: node.status().counters.get("events_seq", 0) >= subscriber.last)
        assert node.status().counters["events"] > 0
        node.kill()
        node = start_node(**settings)
        _, others = Engine(attach, node).write(2, first=100)
        wait_until(lambda: subscriber.poll(0.05) and subscriber.leading(ints(others)) == {"CPU": 8, "STORAGE": 8})
        assert subscriber.leading(ints(blocks)) == {}  # it is on the disk, but nobody has told what its blocks are
        wait_until(lambda: subscriber.is_complete or (subscriber.poll(0.05) and False), what="the answer has its end")


def test_the_form_of_what_is_published(start_here, attach, where):
    node = start_here(**where, events_topic="kv@here", events_hashes="bytes", events_media="tiers")
    context = zmq.Context()
    try:
        replay = context.socket(zmq.REQ)
        replay.connect(where["events_replay"])
        _, blocks = Engine(attach, node).write(2)

        def stored():
            replay.send((0).to_bytes(8, "big"))
            topic, _, payload = replay.recv_multipart()
            assert topic == b"kv@here"
            return decode_batch(payload).events[1:]

        (event,) = wait_until(stored)
        assert (event.block_hashes, event.parent_block_hash, event.block_size) == (blocks, None, 16)
        assert (event.token_ids, event.lora_id, event.medium) == ([], None, "host")
    finally:
        context.destroy(linger=0)


def test_chunks_that_clients_name_are_not_published(start_here, attach, where):
    node = start_here(**where)
    client = attach(node)
    with Subscriber(*where.values(), check_s=0.3) as subscriber:
        slots = client.ask(Admit([b"n" * 16], GRANULE_BYTES)).granted_slots
        client.ask(Fill(slots, seal=True))
        Engine(attach, node).write(1)
        wait_until(lambda: subscriber.poll(0.05) and len(subscriber.index))
        assert len(subscriber.index) == BLOCKS


def test_a_proxy_that_follows_a_node_knows_its_chunks(start_here, attach, place):
    env = Env()
    index = ChunkIndex(1000, env.counters)

    async def main():
        heard = []

        def take(name, message):
            if isinstance(message, NodeReport):
                heard.append(name)
                following.heard(name, message.epoch)
            else:
                following.took(name, message)

        control = Control(f"ipc://{place}/proxy.sock", env, take)
        following = Following(index, control, env, timeout_s=60.0)
        control.start()
        try:
            node = await asyncio.to_thread(start_here, proxy=control.address, report_s=0.1)
            engine = await asyncio.to_thread(Engine, attach, node)
            keys, _ = await asyncio.to_thread(engine.write, 3)
            name = await until(lambda: heard and heard[-1])
            await until(lambda: following.lookup(keys) == ({name: {ANY: 3, "host": 3}}, True))
            await asyncio.to_thread(attach(node).ask, Delete(keys[2:]))
            await until(lambda: following.lookup(keys) == ({name: {ANY: 2, "host": 2}}, True))
            await asyncio.to_thread(node.close)
            node = await asyncio.to_thread(start_here, proxy=control.address, report_s=0.1)
            await until(lambda: following.lookup(keys) == ({}, True))
        finally:
            control.close()

    asyncio.run(main())


async def until(condition):
    for _ in range(3000):
        if result := condition():
            return result
        await asyncio.sleep(0.01)
    raise AssertionError("not in time")
