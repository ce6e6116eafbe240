"""Reasons why an answer of PDX's proxy may differ from an engine's: each with its sentence, and what it covers.

A difference that no reason covers is a defect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from pdx.bench.parity.cases import HIDDEN
from pdx.bench.parity.essence import ABSENT, Difference
from pdx.bench.parity.records import Answer, Case

_OF_PAGES = ("vary", "access-control-allow-origin", "access-control-allow-credentials", "access-control-expose-headers")
_ITEMS = re.compile(r"<dict of \d+ items>")

# Whether a reason covers a difference: (case, plain answer, proxy's answer, difference).
Covers = Callable[[Case, Answer, Answer, Difference], bool]


class Reason(NamedTuple):
    """A kind of intended difference."""

    name: str
    sentence: str
    covers: Covers
    is_general: bool = False  # about headers of answers in general; not counted as `listed`


def _header(*names: str, added: bool = True) -> Covers:
    """Cover these headers where plain does not send them; with `added=False`, where the values differ, too."""

    def covers(_case: Case, _plain: Answer, _got: Answer, found: Difference) -> bool:
        return found.path[:1] == ("headers",) and found.path[1] in names and (not added or found.want == ABSENT)

    return covers


def _object(answer: Answer) -> Mapping[str, Any]:
    with suppress(ValueError, RecursionError):
        found = json.loads(answer.content)
        return found if isinstance(found, dict) else {}
    return {}


def _error(answer: Answer) -> Mapping[str, Any]:
    """An answer's `error` object; empty if it has none."""
    error = _object(answer).get("error")
    return error if isinstance(error, dict) else {}


def _state(case: Case, _plain: Answer, got: Answer, _found: Difference) -> bool:
    return case.endpoint in ("/health", "/ping") and got.status == 200


def _hidden(case: Case, _plain: Answer, got: Answer, _found: Difference) -> bool:
    return case.endpoint == HIDDEN and got.status == 404


def _paths(_case: Case, plain: Answer, got: Answer, found: Difference) -> bool:
    return plain.status == got.status in (404, 405) and "detail" in _object(plain) and found.path[0] == "body"


def _head(case: Case, plain: Answer, got: Answer, found: Difference) -> bool:
    if case.method == "HEAD":
        return plain.status == 405 and got.status == 200
    return found.path == ("headers", "allow") and bool(found.got == f"{found.want},HEAD")


def _page(case: Case, _plain: Answer, got: Answer, found: Difference) -> bool:
    is_header = found.path[0] == "headers" and found.got == ABSENT and str(found.path[1]) in _OF_PAGES
    return is_header or ("Access-Control-Request-Method" in case.headers and got.status == 405)


def _refused(_case: Case, plain: Answer, got: Answer, _found: Difference) -> bool:
    words = str(_error(got).get("message"))
    return plain.status >= 400 and got.status in (400, 415) and words.startswith("the request")


def _packed(case: Case, _plain: Answer, got: Answer, _found: Difference) -> bool:
    return "Content-Encoding" in case.headers and got.status == 415


def _transfer(case: Case, plain: Answer, got: Answer, _found: Difference) -> bool:
    sent = case.content or b""
    return b'"vllm_xargs"' in sent and b'"kv_transfer_params"' in sent and (plain.status, got.status) == (400, 200)


def _counted(_case: Case, plain: Answer, got: Answer, found: Difference) -> bool:
    same = [_ITEMS.sub("", str(each)) for each in (found.want, found.got)]
    return plain.status == got.status == 400 and found.path[-1] == "message" and same[0] == same[1]


def _at_once(_case: Case, plain: Answer, got: Answer, _found: Difference) -> bool:
    return plain.status == 200 and got.status >= 500 and plain.content.startswith(b'data: {"error":')


REASONS = (
    Reason("server", "The header `Server` says pdx, and not what is behind it.", _header("server", added=False), True),
    Reason(
        "no buffering",
        "Streams have `Cache-Control: no-cache` and `X-Accel-Buffering: no`, for gateways that would hold them back.",
        _header("cache-control", "x-accel-buffering"),
        True,
    ),
    Reason(
        "debug headers",
        "With `--debug-headers` the proxy says how an answer came about.",
        _header("x-pdx-transfer-id", "x-pdx-mode"),
        True,
    ),
    Reason("request id", "A client's own `X-Request-Id` comes back.", _header("x-request-id"), True),
    Reason("pages", "Scripts of web pages are let in by `--allowed-origins` only; vLLM's default is all.", _page, True),
    Reason("health", "`/health` and `/ping` tell of all engines, as JSON.", _state),
    Reason("head", "`HEAD` is answered where the proxy answers `GET` itself.", _head),
    Reason(
        "not for clients",
        "Routes that set an engine up, look into it or stop it are 404, and so are its metrics and its pages.",
        _hidden,
    ),
    Reason("paths", "404 and 405 of a path have the form of all errors, `error`; vLLM's have `detail`.", _paths),
    Reason(
        "own words",
        "What is no JSON object, or of no kind that the route takes, reaches no engine: 400, in the proxy's words.",
        _refused,
    ),
    Reason("packed", "A body with `Content-Encoding` is refused (415); vLLM reads it as if it had none.", _packed),
    Reason(
        "transfer",
        "A client's transfer parameters are removed; vLLM refuses an object in `vllm_xargs`.",
        _transfer,
    ),
    Reason("counted", "An error that counts a body's fields counts those of the transfer.", _counted),
    Reason("at once", "A stream that an engine begins with an error 5xx is that error, with its status.", _at_once),
)


def reason(case: Case, plain: Answer, got: Answer, found: Difference) -> Reason | None:
    """The first reason that covers a difference."""
    return next((each for each in REASONS if each.covers(case, plain, got, found)), None)
