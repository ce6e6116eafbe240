"""Requests that let chunks be stored with a loss, in vLLM's own prefix cache."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch deprecate parts of each other
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    from pdx.vllm.content import Content


def request_of(salt: str | None) -> Any:
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(16, sha256)
    sampling = SamplingParams(max_tokens=1)
    return Request("r", list(range(64)), sampling, None, cache_salt=salt, block_hasher=hasher)


def test_vllms_own_cache_keeps_requests_apart_that_let_chunks_be_stored_with_a_loss():
    hashes = []
    for form in ("", "fp8:bf16:1x2x3x4x5", "int8:bf16:1x2x3x4x5"):
        for salt in (None, "a"):
            once, twice = request_of(salt), request_of(salt)
            before = list(once.block_hashes)
            assert Content.keep_apart(once, form)
            assert Content.keep_apart(twice, form)
            assert len(once.block_hashes) == 4
            assert once.block_hashes == twice.block_hashes, "those of one form find each other's"
            assert (once.block_hashes == before) == (not form)
            hashes += once.block_hashes
            assert len({bytes(each) for each in hashes}) == len(hashes), "and nobody else's"
            once.append_output_token_ids(list(range(16)))
            twice.append_output_token_ids(list(range(16)))
            assert once.block_hashes == twice.block_hashes


def test_no_clients_salt_finds_blocks_of_a_request_that_is_kept_apart():
    lossy = request_of("a")
    assert Content.keep_apart(lossy, "fp8:bf16:1x2x3x4x5")
    for form in ("", "fp8:bf16:1x2x3x4x5"):
        hostile = request_of(lossy.cache_salt)
        assert Content.keep_apart(hostile, form)
        assert hostile.block_hashes[0] != lossy.block_hashes[0]
