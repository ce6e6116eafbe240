"""Routers that know nothing of PDX, before a pair of engines at one node; `test_wired_pair` has two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pair import Pair
from routers import check_handed_over, vllm_router

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]


def test_vllm_router_hands_over_what_is_prefilled(pair: Pair, tmp_path: Path) -> None:
    with vllm_router(tmp_path, pair.prefill.url, pair.decode.url) as router:
        check_handed_over(router.url, pair.prefill, pair.decode, 8000)
    pair.wait_at_rest()


def test_so_do_legs_as_other_routers_send_them(pair: Pair) -> None:
    check_handed_over("", pair.prefill, pair.decode, 8100)
    pair.wait_at_rest()
