"""The control socket: reports in, cancels out, nonsense counted."""

import asyncio
import json
import os
import socket
import time

import msgpack
import pytest
import zmq
from control_stage import ControlStage, control_stage
from proxy_harness import cluster, until, within

from pdx.errors import ConfigError
from pdx.proxy.control import Control
from pdx.wire import messages
from pdx.wire.messages import Cancel, Mark
from pdx.wire.proxy import Follow, NodeReport

TRANSFER = "x" * 32
REPORT = messages.encode(
    NodeReport(version=messages.VERSION, node="n", epoch=1, arena_bytes=0, free_bytes=0, engines=[], marks=[])
)


async def reported(made, *names):
    """Nodes of these names, of which the proxy has heard."""
    nodes = [made.node(name) for name in names]
    for node in nodes:
        await node.report()
    await until(lambda: len(made.reports) == len(names))
    return nodes


async def test_nonsense_is_dropped_and_counted_and_logged_once_in_a_while(caplog):
    async with cluster() as made:
        cancel = messages.encode(Cancel(transfer=TRANSFER))
        for frame in (b"", b"\xc1", msgpack.packb(["NodeReport", 1]), cancel, *[b"not msgpack"] * 200):
            await made.node.socket.send(frame)
        await made.node.socket.send_multipart([b"two", b"frames"])
        await made.node.report(version=99)
        await made.node.report()
        await made.metric_reaches(2, "pdx_proxy_reports_total")
        assert await made.metric("pdx_proxy_control_dropped_total", reason="malformed") == 205
        assert await made.metric("pdx_proxy_control_dropped_total", reason="version") == 1
        assert made.proxy.env.counters["messages_dropped"] == 206
    assert len([record for record in caplog.records if "dropped a message" in record.message]) <= 2


async def test_what_cannot_be_asked_is_counted_and_said_once(caplog):
    async with cluster() as made:
        for _ in range(3):
            await made.node.report(
                ("x", "decode", ""), ("y", "decode", "http://0.0.0.0:1"), ("z", "decode", "http://u:secret@a:1")
            )
        await made.metric_reaches(9, "pdx_proxy_control_dropped_total", reason="unroutable")
        await made.node.report(*[("e", "prefill", f"http://e:{port}") for port in range(1, 1025)])
        await made.metric_reaches(1, "pdx_proxy_control_dropped_total", reason="engines")
        assert await made.metric("pdx_proxy_engines", role="prefill") == 1 + 62, "it named two before"
        assert await made.metric("pdx_proxy_engines", role="decode") == 1
    assert sum("engine 'x'" in record.getMessage() for record in caplog.records) == 1
    assert "secret" not in caplog.text


async def test_a_cancel_goes_to_the_nodes_of_its_transfer_and_survives_one_that_left(tmp_path):
    """Each one costs a node time, and whoever can send requests can end them."""
    with control_stage(f"ipc://{tmp_path}/c/p.sock") as made:
        nodes = await reported(made, "one", "two", "three")
        made.control.tell(Cancel("a" * 32), {"one", "two"})
        made.control.tell(Cancel("b" * 32), {"three", "left long ago"})
        made.control.tell(Cancel("c" * 32), {"two", ""})
        for node, first in zip(nodes, "aab", strict=True):
            assert [await node.cancelled() for _ in range(2)] == [first * 32, "c" * 32]
        nodes[1].close()
        for number in range(20):
            made.control.tell(Cancel(f"{number:032d}"), {""})
        assert [await nodes[0].cancelled() for _ in range(20)] == [f"{number:032d}" for number in range(20)]
        assert made.drops == []


async def test_what_a_node_does_not_read_is_lost_to_it_and_counted(tmp_path):
    """It holds nobody up, and nothing piles up for it."""
    with control_stage(f"ipc://{tmp_path}/c/p.sock") as made:
        deaf, other = await reported(made, "deaf", "other")
        most, sent = 100_000, 0
        while not made.drops and sent < most:
            made.control.tell(Cancel(f"{sent:032d}"), {"deaf"})
            sent += 1
        assert sent < most
        assert made.drops == ["peer_full"]
        made.control.tell(Cancel(TRANSFER), {""})
        assert await other.cancelled() == TRANSFER


async def test_only_the_node_that_is_followed_hears_of_it_whatever_its_name(tmp_path):
    """Else a node without a name has all others begin anew, again and again."""
    with control_stage(f"ipc://{tmp_path}/c/p.sock") as made:
        nameless, named = await reported(made, "", "node")
        for name, stream in (("", 1), ("node", 2), ("nobody", 3)):
            made.control.follow(name, Follow(stream))
        assert (await nameless.heard(Follow)).stream == 1
        assert (await named.heard(Follow)).stream == 2


async def test_no_message_is_left_lying(tmp_path):
    """ZMQ tells of incoming messages once; neither a full batch nor sending may lose that news."""
    with (
        control_stage(f"ipc://{tmp_path}/c/p.sock") as made,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as node,
    ):
        node.setsockopt(zmq.LINGER, 0)
        node.connect(made.control.address)
        node.send(REPORT)
        await until(lambda: len(made.took) == 1)
        for _ in range(900):  # the loop does not run meanwhile: they pile up
            node.send(REPORT)
        await until(lambda: len(made.took) == 901)
        node.send(REPORT)
        arrived_by = time.monotonic() + 0.1
        while time.monotonic() < arrived_by:
            made.control.tell(Cancel(TRANSFER), {""})
        await until(lambda: len(made.took) == 902)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else for a moment")
async def test_another_user_is_not_heard_where_the_folder_was_opened(place):
    """The folder keeps others out; where somebody widens its mode, the kernel still says who connects."""
    with control_stage(f"ipc://{place}/c/p.sock") as made:
        for path, mode in ((place, 0o711), (place / "c", 0o711), (place / "c" / "p.sock", 0o777)):
            path.chmod(mode)
        with socket.socket(socket.AF_UNIX) as stranger:
            os.seteuid(65534)
            try:
                stranger.connect(f"{place}/c/p.sock")
            finally:
                os.seteuid(0)
            stranger.setblocking(False)
            assert await within(asyncio.get_running_loop().sock_recv(stranger, 10)) == b""
        await made.node("own").report()
        await until(lambda: made.reports)
    place.chmod(0o700)


async def test_an_address_has_one_owner(tmp_path):
    address = f"ipc://{tmp_path}/c/p.sock"
    second = ControlStage(address).control
    with control_stage(address), pytest.raises(ConfigError, match="another proxy"):
        second.start()
    second.start()
    second.close()
    assert not (tmp_path / "c" / "p.sock").exists()


async def test_marks_of_nodes_join_the_timeline(made):
    _, headers, _ = await made.post("/v1/completions", {"prompt": "beta", "temperature": 0})
    transfer = headers["x-pdx-transfer-id"]
    marks = [
        Mark(transfer=transfer, event=event, at_ns=at, nbytes=nbytes, tokens=tokens, engine="p0")
        for event, at, nbytes, tokens in [("admitted", 10, 0, 64), ("prefill_end", 20, 30, 0), ("sealed", 30, 40, 0)]
    ]
    await made.node.report(marks=marks)
    await made.metric_reaches(2, "pdx_proxy_reports_total")
    timeline = await made.timeline(transfer)
    assert len(timeline["moments"]) == 7 + 3
    assert timeline["breakdown"]["moved_bytes"] == 40
    assert timeline["breakdown"]["hidden_share"] == 0.75
    assert timeline["breakdown"]["reused_tokens"] == 64
    assert timeline["outcome"] == "ok"


async def test_what_goes_wrong_in_the_control_socket_ends_nothing(tmp_path, monkeypatch, caplog):
    """Once an error of ZMQ in a message to one node kept the next node from being told."""

    class Stage(ControlStage):
        def take(self, node, message):
            if node == "bad":
                raise RuntimeError("of the report's taker")
            super().take(node, message)

    with control_stage(f"ipc://{tmp_path}/c/p.sock", Stage) as made:
        counters, nodes = made.env.counters, [made.node(name, route=name.encode()) for name in ("bad", "one", "two")]
        await nodes[0].report()
        await until(lambda: counters["internal_errors"])
        for node in nodes[1:]:
            await node.report()
        await until(lambda: len(made.reports) == 2)
        assert counters["internal_errors"] == 1
        send = zmq.Socket.send_multipart

        def failing(self, frames, *how, **more):
            if frames[0] == b"bad":
                raise zmq.ZMQError(zmq.EFSM)
            return send(self, frames, *how, **more)

        monkeypatch.setattr(zmq.Socket, "send_multipart", failing)
        made.control.tell(Cancel(TRANSFER), {""})
        assert counters["internal_errors"] == 2
        assert await nodes[1].cancelled() == await nodes[2].cancelled() == TRANSFER
        await nodes[1].report()
        await until(lambda: len(made.reports) == 3)
    assert [record.message for record in caplog.records if "internal error" in record.message]


async def test_silent_nodes_are_noticed_although_telling_others_failed(monkeypatch):
    async with cluster() as made:
        failures = [zmq.ZMQError(zmq.EFSM)]
        send = Control.send_peers

        def failing(self, entries):
            if failures:
                raise failures.pop()
            send(self, entries)

        monkeypatch.setattr(Control, "send_peers", failing)
        assert json.loads((await made.get("/health"))[1])["nodes"] == 1
        await made.other_node().report(listen="tcp://127.0.0.1:1")  # so that there is news
        await until(lambda: not failures)
        made.pass_time(601.0)

        async def are_gone():
            return not json.loads((await made.get("/health"))[1])["nodes"]

        await until(are_gone)
        assert made.proxy.env.counters["internal_errors"] == 1


async def test_a_raw_frame_larger_than_any_report_ends_that_connection_only(made):
    big = made.other_node()
    await big.socket.send(b"x" * (messages.MAX_FRAME_BYTES + 1))
    await made.node.report()
    await made.metric_reaches(2, "pdx_proxy_reports_total")
