"""Routers that know nothing of PDX, before a pair of engines at one node; `test_wired_pair` has two nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pair import Pair
from routers import check_handed_over, example_proxy, vllm_router

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]


def test_vllm_router_hands_over_what_is_prefilled(pair: Pair, tmp_path: Path) -> None:
    with vllm_router(tmp_path, pair.prefill.url, pair.decode.url) as router:
        check_handed_over(router.url, pair.prefill, pair.decode, 8000)
    pair.wait_at_rest()


def test_so_does_vllms_example_proxy(pair: Pair, tmp_path: Path) -> None:
    with example_proxy(tmp_path, pair.prefill.url, pair.decode.url) as router:
        check_handed_over(router.url, pair.prefill, pair.decode, 8100)
    pair.wait_at_rest()


def test_so_does_llmds_sidecar(pair: Pair) -> None:
    check_handed_over("", pair.prefill, pair.decode, 8200)
    pair.wait_at_rest()
