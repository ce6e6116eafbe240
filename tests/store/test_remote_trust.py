"""Who may use a remote store, whose word is taken for it, and what is said of an address or a file that is none."""

import contextlib
import os
import ssl
from datetime import datetime, timedelta

import pytest
from remote_bed import S3Handler, certificate, credentials, key, made, opened, s3_answers, signed

from pdx.errors import ConfigError, TierError
from pdx.store.health import MAX_ERRORS as MAX_FAILURES


def test_a_user_who_may_only_read_reads(beds, redis, monkeypatch):
    assert beds(redis.url).opened().store(1) is None
    redis.cli("ACL", "SETUSER", "reader", "on", ">told", "~pdx:*", "+@read", "+ping", "+client", "+hello")
    monkeypatch.setenv("PDX_REMOTE_USER", "reader")
    monkeypatch.setenv("PDX_REMOTE_PASSWORD", "told")
    bed = beds(redis.url).opened()
    assert bed.store(2).kind == "denied"
    assert not bed.tier.takes_stores
    assert bed.sought([1]) == 1
    assert bed.load(1) is None


def test_what_a_reader_may_not_remove_costs_itself_alone(beds, redis, monkeypatch, caplog):
    """Chunks that are damaged: the store is not to blame, and nothing is paused."""
    bed = beds(redis.url).opened()
    assert [bed.store(number) for number in range(MAX_FAILURES + 2)] == [None] * (MAX_FAILURES + 2)
    for number in range(MAX_FAILURES + 1):
        name = f"v3/{key(number).hex()}-0"
        good = redis.raw(name)
        redis.put(name, good[:9000] + bytes([good[9000] ^ 4]) + good[9001:])
    redis.cli("ACL", "SETUSER", "reader", "on", ">told", "~pdx:*", "+@read", "+ping", "+client", "+hello")
    monkeypatch.setenv("PDX_REMOTE_USER", "reader")
    monkeypatch.setenv("PDX_REMOTE_PASSWORD", "told")
    bed = beds(redis.url).opened()
    assert bed.sought(range(MAX_FAILURES + 2)) == MAX_FAILURES + 2
    assert {bed.load(number).kind for number in range(MAX_FAILURES + 1)} == {"corrupt"}
    assert bed.counters["remote_corrupt"] == MAX_FAILURES + 1
    assert "is not removed" in caplog.text
    assert bed.counters["remote_paused"] == 0
    assert bed.tier.find([key(0)], 1) == [], "it is not loaded again at once"
    assert bed.load(MAX_FAILURES + 1) is None


def test_wrong_credentials_are_said_and_right_ones_come_from_a_file(beds, redis, tmp_path, monkeypatch, caplog):
    redis.cli("CONFIG", "SET", "requirepass", "the right one")
    monkeypatch.setenv("PDX_REMOTE_PASSWORD", "a wrong one")
    bed = beds(redis.url)
    bed.paused("denied")
    assert "denied" in bed.tier.status().state
    assert "a wrong one" not in caplog.text
    file = credentials(tmp_path, password="the right one")
    assert beds(redis.url, credentials=file).opened().store(1) is None


def test_wrong_credentials_of_s3_are_said_and_right_ones_come_from_a_file(beds, s3, tmp_path, monkeypatch):
    env = s3.env()
    own = {name.lower(): env.pop(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
    for name, value in (env | {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "wrong"}).items():
        monkeypatch.setenv(name, value)
    beds(s3.url).paused("denied")
    bed = beds(s3.url, credentials=credentials(tmp_path, **own)).opened()
    assert bed.store(1) is None
    assert bed.load(1) is None


class ObjectStore(S3Handler):
    """S3 as far as a client needs it that has nothing there: what is stored is refused with `answer`."""

    answer, tokens = (507, "StorageFull"), set()

    def do_GET(self):
        self.tokens.add(self.headers["x-amz-security-token"])
        is_list = "list-type" in self.path
        self._say(*((200, "ListBucketResult") if is_list else (404, "NoSuchKey")))

    def do_PUT(self):
        self.rfile.read(int(self.headers["content-length"]))
        self._say(*self.answer)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        refused = "<Error><Key>one</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        self.say(200, f"<DeleteResult>{refused}</DeleteResult>")

    def _say(self, status, code):
        listed = (
            "<Name>bucket</Name><Prefix/><KeyCount>0</KeyCount><MaxKeys>1</MaxKeys><IsTruncated>false</IsTruncated>"
        )
        text = f"<{code}>{listed}</{code}>" if status == 200 else f"<Error>\n<Code>{code}</Code></Error>"
        self.say(status, text)


@pytest.fixture
def object_store(monkeypatch):
    class Own(ObjectStore):
        tokens = set()

    with s3_answers(Own, monkeypatch):
        yield Own


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (507, "XMinioStorageFull", "full"),
        (403, "QuotaExceeded", "full"),
        (403, "RequestTimeTooSkewed", "denied"),
        (401, "Unauthorized", "denied"),
        (400, "EntityTooLarge", "full"),
        (400, "SomethingElse", "failed"),
    ],
)
def test_an_object_store_that_takes_nothing_is_read_on(beds, tmp_path, caplog, object_store, status, code, kind):
    """And the session token of a file reaches it."""
    object_store.answer = (status, code)
    file = credentials(tmp_path, access_key_id="403", secret_access_key="x", session_token="one")
    bed = beds("s3://connect-certificate-credential/403", credentials=file).opened()
    assert bed.store(0x0403).kind == kind
    assert bed.counters[f"remote_{kind}"] == 1
    assert code in caplog.text, "who reads the log sees why"
    assert bed.tier.takes_stores == (kind == "failed")
    assert bed.sought([2]) == 0
    status = bed.tier.status()
    assert (status.state, status.is_up) == ("ok" if kind == "failed" else "paused: writes failed", True)
    assert object_store.tokens == {"one"}


def test_an_object_store_that_answers_writes_alone_with_errors_is_read_on(beds, tmp_path, object_store):
    """As one that wants fewer of them, or has lost its keys."""
    object_store.answer = (503, "SlowDown")
    file = credentials(tmp_path, access_key_id="x", secret_access_key="x", session_token="one")
    bed = beds("s3://bucket", credentials=file).opened()
    assert [bed.store(number).kind for number in range(MAX_FAILURES)] == ["failed"] * MAX_FAILURES
    assert not bed.tier.takes_stores
    assert bed.sought([9]) == 0
    assert not bed.counters["remote_paused"]


def test_an_object_store_that_lets_nothing_be_removed_says_so(object_store, tmp_path):
    file = credentials(tmp_path, access_key_id="x", secret_access_key="x")
    with contextlib.closing(opened("s3://bucket", credentials=file)) as store:
        with pytest.raises(TierError) as raised:
            store.remove(["one", "two"])
        assert raised.value.kind == "denied"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_an_endpoint_without_tls_is_that_of_any_variable_of_the_client(object_store, tmp_path, monkeypatch, name):
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(name, endpoint)
    file = credentials(tmp_path, access_key_id="x", secret_access_key="x", session_token="one")
    with contextlib.closing(opened("s3://bucket", credentials=file)) as store:
        assert store.heads(["one"], 1) == [None]


@pytest.mark.parametrize(("ahead_s", "is_found"), [(-3000.0, True), (0.0, True), (3000.0, True), (3700.0, False)])
def test_what_clocks_differ_by_is_added_to_the_age(beds, s3, monkeypatch, ahead_s, is_found):
    """S3 itself refuses whoever's clock is a quarter of an hour off."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz):
            return datetime.now(tz) + timedelta(seconds=ahead_s)

    monkeypatch.setattr("pdx.store.remote.s3_backend.datetime", Clock)
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    bed = beds(s3.url, ttl_s=3600.0).opened()
    assert bed.store(1) is None
    assert bed.sought([1]) == is_found
    assert (bed.load(1) is None) == is_found


def test_tls_is_checked(beds, tmp_path, serve):
    cert = certificate(tmp_path)
    other, _ = certificate(tmp_path, "other")
    server = serve(made("redis", tmp_path / "redis", tls=cert))
    assert beds(server.url, ca=str(cert[0])).opened().store(1) is None
    bed = beds(server.url, ca=str(other))
    bed.paused("untrusted")
    bed = beds(server.url)
    bed.paused("untrusted")
    bed = beds(server.url.replace("rediss", "redis"))
    bed.until(lambda: bed.counters["remote_paused"])


@pytest.mark.long
def test_tls_reaches_each_member_of_a_cluster(beds, tmp_path, serve):
    cert = certificate(tmp_path)
    other, _ = certificate(tmp_path, "other")
    server = serve(made("cluster", tmp_path / "cluster", tls=cert))
    bed = beds(server.url, ca=str(cert[0])).opened()
    assert [bed.store(number) for number in range(30)] == [None] * 30
    assert bed.sought(range(30)) == 30
    assert all(member.names() for member in server.members)
    bed = beds(server.url, ca=str(other))
    bed.paused("untrusted")


def test_a_certificate_of_another_host_is_refused(beds, tmp_path, serve):
    cert = certificate(tmp_path, host="127.0.0.2")
    server = serve(made("redis", tmp_path / "redis", tls=cert))
    bed = beds(server.url, ca=str(cert[0]))
    bed.paused("untrusted")
    assert beds(server.url.replace("127.0.0.1", "127.0.0.2"), ca=str(cert[0])).opened().store(1) is None


def test_tls_of_s3_is_checked(beds, tmp_path, monkeypatch):
    ca, *own = signed(tmp_path)
    other, *_ = signed(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*own)
    file = credentials(tmp_path, access_key_id="x", secret_access_key="x")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with s3_answers(ObjectStore, monkeypatch) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{server.server_port}")
        good = beds("s3://bucket", ca=str(ca), credentials=file).opened()
        assert "SSL_CERT_FILE" not in os.environ, "it is for this store alone"
        for of in (str(other), "", str(own[0])):  # another's, the system's, and one that may sign nothing
            beds("s3://bucket", ca=of, credentials=file).paused("untrusted")
        assert good.sought([1]) == 0
        assert good.tier.status().is_up


# ---- what is said at the start --------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "valkey://",
        "valkey://host:port",
        "valkey://host:99999",
        "valkey://host/one",
        "valkey://host?db=1",
        "s3://",
        "s3://bucket?region=x",
        "http://host/bucket",
        "/var/cache",
        "",
    ],
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match=r"no address of a remote store"):
        opened(url)


@pytest.mark.parametrize("url", ["valkey://me:secret@host", "rediss://:secret@host", "s3://key:secret@bucket/x"])
def test_credentials_in_an_address_are_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="PDX_REMOTE_PASSWORD") as raised:
        opened(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("password = 'x'", 0o644, "chmod 600"),
        ("pass = 'x'", 0o600, "unknown field `pass`"),
        ("password = 1", 0o600, "Expected `str`"),
        ("password", 0o600, "no TOML"),
        (None, 0, "cannot be read: No such file"),
    ],
)
def test_a_file_of_credentials_that_is_none_is_refused(tmp_path, text, mode, why):
    file = tmp_path / "remote.toml"
    if text is not None:
        file.touch(mode=mode)
        file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        opened("valkey://host", credentials=str(file))


def test_a_file_of_certificates_that_is_missing_is_said(tmp_path):
    with pytest.raises(ConfigError, match="certificates"):
        opened("rediss://host", ca=str(tmp_path / "none.pem"))


@pytest.mark.parametrize(
    ("url", "module", "extra", "package"),
    [("valkey://h", "redis", "redis", r"redis\[hiredis\]"), ("s3://b", "obstore", "s3", "obstore")],
)
def test_a_package_that_is_missing_is_named(monkeypatch, url, module, extra, package):
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"pdx.store.remote.{extra}_backend", raising=False)
    with pytest.raises(ConfigError, match=rf"pip install '{package}[<>]"):
        opened(url)
