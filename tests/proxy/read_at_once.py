"""What the proxy reads in steps, read at once."""

from __future__ import annotations

from typing import Any

from pdx.proxy import body, plan
from pdx.proxy.outline import at_once
from pdx.proxy.plan import Body, Plan, Prompt
from pdx.proxy.routes import Route


def parse(raw: bytes | bytearray) -> Body:
    return at_once(body.parsing(raw))


def classify(route: Route, fields: Body, *, min_split_tokens: int = 0) -> Plan:
    return at_once(plan.planning(route, fields, min_split_tokens=min_split_tokens))


def single_prompt(prompt: Any) -> Prompt | None:
    return at_once(plan.single_prompt(prompt))
