"""Processes that `pdx.bench.node.flood` starts: strangers that flood a node, an engine that asks it all the time.

`python -m pdx.bench.node.flood_child connects|hellos|pings ARGUMENTS…`; each ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time

import zmq

from pdx.client.connection import Connection
from pdx.wire.messages import VERSION, Hello, Ping
from pdx.wire.peer_messages import PeerFrame, PeerHello, encode_peer

PAUSE_S = 0.01
ANSWER_S = 60.0


def until_told() -> threading.Event:
    """Set when standard input ends."""
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    return over


def connects(host: str, port: int, count: int, over: threading.Event) -> dict[str, int]:
    """Keep `count` connections open that say nothing; one that is closed is opened again."""
    chosen = selectors.DefaultSelector()
    opened = refused = 0
    while not over.is_set():
        for _ in range(min(200, count - len(chosen.get_map()))):
            connection = socket.socket()
            connection.setblocking(False)
            opened += 1
            refused += connection.connect_ex((host, port)) not in (0, 115)
            chosen.register(connection, selectors.EVENT_READ)
        for key, _ in chosen.select(PAUSE_S):
            chosen.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
    return {"opened": opened, "refused": refused}


def hellos(address: str, count: int, over: threading.Event) -> dict[str, int]:
    """So many ZMQ sockets without a key, each with a hello under a name of its own."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 10)
    sockets = []
    for number in range(count):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        hello = PeerHello(VERSION, f"stranger-{number}", number + 1, "nowhere", 1, ["tcp"])
        dealer.send(encode_peer(PeerFrame(1, hello)), zmq.NOBLOCK)
        sockets.append(dealer)
        if over.is_set():
            break
    over.wait()
    context.destroy(0)
    return {"hellos": len(sockets)}


def pings(address: str, over: threading.Event) -> dict[str, list[float]]:
    """Ask the node for a sign of life again and again; how long each answer took."""
    times = []
    with Connection(address, Hello(VERSION, os.getpid(), "client", name="pings")) as connection:
        connection.attach(ANSWER_S)
        print("ready", flush=True)
        while not over.is_set():
            started_at = time.perf_counter()
            connection.call(Ping(), ANSWER_S)
            times.append(time.perf_counter() - started_at)
            time.sleep(PAUSE_S)
    return {"times": times}


def main() -> None:
    role, *arguments = sys.argv[1:]
    over = until_told()
    if role == "connects":
        found: object = connects(arguments[0], int(arguments[1]), int(arguments[2]), over)
    elif role == "hellos":
        found = hellos(arguments[0], int(arguments[1]), over)
    else:
        found = pings(arguments[0], over)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
