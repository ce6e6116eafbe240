"""UCX passes the suite, over what it finds best here and over nothing but TCP; and what is UCX's own."""

import itertools
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
from ucx_conformance import LEAVES_A_WORKER, UcxConformance, stage_of

from pdx.errors import ProtocolError
from pdx.testing.channel_stage import MIB, Peer, Stage
from pdx.transports.channel import MAX_NOTIFY_BYTES, MAX_PIECES, Piece, merged
from pdx.transports.nixl.region import NixlRegion
from pdx.transports.ucx import engine as ucx_engine
from pdx.transports.ucx.messages import MAX_MESSAGE_BYTES, Done, Put, decode
from pdx.transports.ucx.region import UcxRegion


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> None:
    """The check of all tests, but for those few."""
    if not any(name in request.node.name for name in LEAVES_A_WORKER):
        request.getfixturevalue("nothing_leaks")


class UcxTcpRegion(UcxRegion):
    """As between hosts without RDMA."""

    settings: ClassVar[dict[str, str]] = {"TLS": "tcp"}


@pytest.mark.long
class TestUcx(UcxConformance):
    region = UcxRegion


@pytest.mark.long
class TestUcxOverTcp(UcxConformance):
    region = UcxTcpRegion


@pytest.fixture
def stage() -> Iterator[Stage]:
    with stage_of(UcxRegion) as stage:
        yield stage


@pytest.fixture
def peer(stage: Stage) -> Peer:
    return stage.peer()


def test_it_leaves_the_environment_alone() -> None:
    """ucxx sets variables when it is imported, which would change NIXL's UCX in the same process."""
    code = (
        "import os; before = dict(os.environ)\n"
        "from pdx.transports.ucx.region import UcxRegion; assert UcxRegion.availability().is_ok\n"
        "print(dict(os.environ) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "True"


# Before NIXL's UCX is loaded: in a process with both, UCX may crash where an endpoint is closed by force.
class TestStalls:
    """Time in which this process stood still is none that UCX had to let go of memory."""

    @pytest.fixture
    def always_stalls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The engines' clock is a minute ahead each time they look at it."""
        ahead_s = itertools.count(60, 60)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(ahead_s))
        monkeypatch.setattr(ucx_engine, "time", clock)

    def test_the_engine_goes_on_to_settle(self, stage: Stage, always_stalls: None) -> None:
        """Else a listener would close with receives posted, and bytes would land behind it."""
        engine = stage.side(MIB).region.engine
        answers = iter([False, False, True])
        engine.call(lambda: engine.settle(lambda: next(answers), 1.0))
        assert list(answers) == [], "it has asked to the end"

    def test_the_engine_does_not_settle_for_ever(self, stage: Stage, always_stalls: None) -> None:
        """However often it was stopped."""
        engine = stage.side(MIB).region.engine
        engine.call(lambda: engine.settle(lambda: False, 1.0))

    def test_a_call_waits_for_what_is_being_done(self, stage: Stage, always_stalls: None) -> None:
        """Else whoever closes would go on while the thread is still about to."""

        def work() -> str:
            time.sleep(0.2)  # longer than its caller sleeps between looks at the clock
            return "done"

        assert stage.side(MIB).region.engine.call(work) == "done"

    def test_closing_waits_for_a_stopped_reader(self, stage: Stage, peer: Peer) -> None:
        """By force after a moment, which comes later where this process was stopped, too."""
        side = stage.side()
        channel = side.connect(peer.session((0, 8 * MIB))[1])
        assert stage.written(channel, [Piece(0, 0, MIB)]) == ""
        peer.stop()
        transfers = [channel.write([Piece(0, 0, 8 * MIB)], b"") for _ in range(4)]
        channel._ended = _Stalled()
        channel.close()
        assert all(transfer.poll() for transfer in transfers)


class _Stalled(threading.Event):
    """Its first wait is over before anything has happened, as when the process was stopped meanwhile."""

    was_stalled = False

    def wait(self, timeout: float | None = None) -> bool:
        stalled, self.was_stalled = self.was_stalled, True
        return super().wait(timeout) if stalled else self.is_set()


def test_both_libraries_in_one_process(stage: Stage) -> None:
    """UCXX and NIXL each bring a UCX of their own; a node uses both, one after the other and at once."""
    with stage_of(NixlRegion, first_seed=7) as nixl:
        pairs = []
        for each in (stage, nixl):
            writer, reader = each.side(), each.side()
            pairs.append((each, writer, reader, writer.connect(reader.session((0, 8 * MIB))[1])))
        for _ in range(10):
            under_way = [(each, channel.write([Piece(0, 0, 8 * MIB)], b"x")) for each, _, _, channel in pairs]
            assert [each.finish([transfer]) for each, transfer in under_way] == [[""], [""]]
        for _, writer, reader, _ in pairs:
            assert reader.view == writer.view


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_interpreter_can_end(is_closed: bool) -> None:
    """With a channel and writes under way, closed or not: no crash and no hang."""
    code = (
        "import sys\n"
        "from pdx.transports.channel import Piece\n"
        "from pdx.testing.channel_stage import MIB, Stage\n"
        "from pdx.transports.ucx.region import UcxRegion\n"
        "stage = Stage(UcxRegion); writer, reader = stage.side(), stage.side()\n"
        "channel = writer.region.connect(reader.session((0, MIB))[1])\n"
        "transfers = [channel.write([Piece(0, 0, MIB)], b'') for _ in range(20)]\n"
        f"stage.close() if {is_closed} else [side.path.unlink() for side in (writer, reader)]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


class TestMessages:
    """What a peer can say."""

    def test_neighbours_on_both_sides_are_joined(self) -> None:
        """And others are not."""
        joined = merged([Piece(0, 10, 5), Piece(5, 15, 5), Piece(10, 21, 1), Piece(20, 22, 1), Piece(0, 0, 1)])
        assert joined == [Piece(0, 10, 10), Piece(10, 21, 1), Piece(20, 22, 1), Piece(0, 0, 1)]

    def test_the_longest_fits(self) -> None:
        """So that none of ours is ever cut short."""
        pieces = [Piece(1 << 48, 1 << 48, 1 << 48)] * MAX_PIECES
        longest = msgspec.msgpack.encode(Put(secrets.token_bytes(16), (1 << 32) - 1, pieces, bytes(MAX_NOTIFY_BYTES)))
        assert len(longest) <= MAX_MESSAGE_BYTES
        assert decode(longest)

    @pytest.mark.parametrize(
        "message",
        [
            [2, bytes(15), 0, [[0, 0, 1]], b""],
            [2, bytes(16), 1 << 32, [[0, 0, 1]], b""],
            [2, bytes(16), 0, [], b""],
            [2, bytes(16), 0, [[0, 0, 1]] * (MAX_PIECES + 1), b""],
            [2, bytes(16), 0, [[0, -1, 1]], b""],
            [2, bytes(16), 0, [[0, 0, 0]], b""],
            [2, bytes(16), 0, [[0, 0, 1 << 49]], b""],
            [2, bytes(16), 0, [[0, 0, 1]], bytes(MAX_NOTIFY_BYTES + 1)],
            [1, bytes(16), 1 << 31],
            [0, bytes(16), bytes(16), b""],
            [3, bytes(16), 0, 7],
            [9, bytes(16)],
            {},
        ],
    )
    def test_what_is_out_of_bounds_is_no_message(self, message: object) -> None:
        """All sizes are checked before anything is done with them."""
        with pytest.raises(ProtocolError):
            decode(msgspec.msgpack.encode(message))
        assert decode(msgspec.msgpack.encode(Done(bytes(16), 0, 0))) == Done(bytes(16), 0, 0)
