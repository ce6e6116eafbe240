"""NIXL passes the suite, over what UCX finds best here and over nothing but TCP; and what is NIXL's own."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from pdx.channel import Piece
from pdx.errors import ChannelBroken
from pdx.testing.channel_conformance import ChannelConformance
from pdx.testing.channel_stage import MIB, Stage, wait_until
from pdx.transports.nixl import NixlRegion
from pdx.transports.onesided import BYE, HELLO, WRITE, Ledger, compose, this_process
from pdx.transports.sealed import seal, unseal

_LISTENING = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000")


class NixlTcpRegion(NixlRegion):
    """As between hosts without RDMA."""

    settings: ClassVar[dict[str, str]] = {"TLS": "tcp"}


class TestNixl(ChannelConformance):
    region = NixlRegion


class TestNixlOverTcp(ChannelConformance):
    region = NixlTcpRegion


@pytest.fixture
def stage() -> Iterator[Stage]:
    found = NixlRegion.availability()
    if not found.is_ok:
        pytest.skip(f"nixl: {found.why}; {found.fix}")
    with Stage(NixlRegion) as stage:
        yield stage


def listening_addresses() -> list[str]:
    """Of this process, as the kernel writes them."""
    inodes = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and os.path.lexists(fd)}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1].partition(":")[0] for line in lines if line[3] == _LISTENING and f"socket:[{line[9]}]" in inodes]


def test_it_listens_on_the_loopback_interface_alone(stage: Stage) -> None:
    """Anybody who reaches UCX's port can write to this process."""
    before = len(listening_addresses())
    stage.side(MIB)
    addresses = listening_addresses()
    assert len(addresses) > before
    assert set(addresses) <= set(_LOOPBACK)


def test_it_does_without_torch() -> None:
    """`import nixl` may import torch, which takes seconds."""
    code = (
        "import sys; from pdx.transports.nixl import NixlRegion\n"
        "NixlRegion.availability(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "False"


def test_an_expelled_peer_can_write_but_nobody_hears_of_it(stage: Stage) -> None:
    """The limit of one-sided writes: this is why `revoke` stays False until the peer has stopped."""
    writer, reader = stage.side(), stage.side()
    token, remote = reader.session((0, MIB))
    listener = reader.region.listen()
    channel = writer.region.connect(remote)
    listener.expel(token)
    assert stage.written(channel, [Piece(0, 0, MIB)], b"late") == ""
    assert reader.view[:MIB] == writer.view[:MIB]
    wait_until(lambda: listener.take() or listener.dropped, "the notification comes")
    assert not listener.take()
    assert not listener.revoke(token, 0, MIB)
    channel.close()
    wait_until(lambda: listener.revoke(token, 0, MIB), "the writer has said goodbye")


def test_an_aborted_write_is_not_announced(stage: Stage) -> None:
    """NIXL cannot stop it, but when it is over nobody hears of it, or it was over before."""
    writer, reader = stage.side(), stage.side()
    channel = writer.region.connect(reader.session((0, 8 * MIB))[1])
    transfers = [channel.write([Piece(0, 0, 8 * MIB)], bytes([at])) for at in range(8)]
    for transfer in transfers:
        transfer.abort()
    errors = stage.finish(transfers)
    assert stage.written(channel, [Piece(0, 0, 1)], b"end") == ""
    told = {bytes([at]) for at, error in enumerate(errors) if not error}
    stage.until(lambda: b"end" in reader.payloads() and told <= set(reader.payloads()), "all that arrived are told")
    assert set(reader.payloads()) == told | {b"end"}


def test_a_sealed_detail_opens_with_its_token_alone() -> None:
    """Whatever is changed, the library behind never sees it."""
    token = secrets.token_bytes(16)
    sealed = seal("nixl", 4096, token, b"body")
    assert unseal("nixl", sealed) == b"body"
    other = secrets.token_bytes(16)
    for damaged in (sealed.detail[:-1], sealed.detail + b"x", b"", bytes([sealed.detail[0] ^ 1]) + sealed.detail[1:]):
        with pytest.raises(ChannelBroken):
            unseal("nixl", type(sealed)("nixl", 4096, token, damaged))
    with pytest.raises(ChannelBroken):
        unseal("nixl", type(sealed)("nixl", 4096, other, sealed.detail))


class TestLedger:
    """What a receiver that sees nothing may conclude."""

    def _opened(self) -> tuple[Ledger, bytes]:
        ledger, token = Ledger(MIB), secrets.token_bytes(16)
        ledger.open(token)
        ledger.grant(token, 0, 4096)
        return ledger, token

    def test_a_session_that_nobody_was_heard_of_is_never_over(self) -> None:
        """Its writer may be connecting right now."""
        ledger, token = self._opened()
        ledger.expel(token)
        assert not ledger.revoke(token, 0, 4096)

    def test_goodbye_of_all_connections_ends_an_expelled_session(self) -> None:
        """Not of one, and not before it is expelled."""
        ledger, token = self._opened()
        for name in (b"1" * 8, b"2" * 8):
            ledger.hear(compose(token, HELLO, name, this_process()))
        ledger.hear(compose(token, BYE, b"1" * 8, b""))
        ledger.expel(token)
        assert not ledger.revoke(token, 0, 4096)
        ledger.hear(compose(token, BYE, b"2" * 8, b""))
        assert ledger.revoke(token, 0, 4096)

    def test_an_open_session_keeps_what_it_was_granted(self) -> None:
        """Even when its writer has gone: it may come again."""
        ledger, token = self._opened()
        ledger.hear(compose(token, HELLO, b"1" * 8, this_process()))
        ledger.hear(compose(token, BYE, b"1" * 8, b""))
        assert not ledger.revoke(token, 0, 4096)
        assert ledger.revoke(token, 4096, 4096)

    def test_a_process_that_cannot_be_told_is_never_gone(self) -> None:
        """Of another host, or nonsense."""
        for process in (b"", b"\xc1", this_process().replace(b"pid:[", b"pxd:[")):
            ledger, token = self._opened()
            ledger.hear(compose(token, HELLO, b"1" * 8, process))
            ledger.expel(token)
            assert not ledger.revoke(token, 0, 4096)

    def test_strangers_are_dropped_and_counted(self) -> None:
        """Too short, an unknown token, an unknown kind, an expelled session."""
        ledger, token = self._opened()
        for message in (
            b"",
            b"x" * 24,
            compose(secrets.token_bytes(16), WRITE, bytes(8), b""),
            compose(token, 9, bytes(8), b""),
        ):
            ledger.hear(message)
        ledger.expel(token)
        ledger.hear(compose(token, WRITE, bytes(8), b""))
        assert ledger.dropped == 5
        assert not ledger.take()
