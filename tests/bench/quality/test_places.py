"""KV at other positions, on a small Llama: where it must be exact, and that the bench sees where it is not."""

import pytest

torch = pytest.importorskip("torch")

from pdx.bench.harness.tiny_llama import make_model  # noqa: E402
from pdx.bench.quality import places  # noqa: E402
from pdx.bench.quality.kinds import APART  # noqa: E402
from pdx.bench.quality.model import Model  # noqa: E402
from pdx.bench.quality.run import Row, recovered  # noqa: E402
from pdx.bench.quality.texts import Sample  # noqa: E402

SHAPE = {"hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "intermediate": 64}
SAMPLE = Sample("text", [(7 * at) % 90 + 32 for at in range(128)], [40, 41, 42])


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return Model(make_model(tmp_path_factory.mktemp("one"), layers=1, **SHAPE))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return Model(make_model(tmp_path_factory.mktemp("three"), layers=3, **SHAPE))


@pytest.mark.parametrize("sink_tokens", [0, 1, 16])
def test_keys_of_a_first_layer_are_exact_wherever_they_move(one_layer, sink_tokens):
    exact = places.recomputed(sink_tokens)(one_layer, SAMPLE)
    made = places.moved(one_layer, SAMPLE, exact, sink_tokens=sink_tokens)
    torch.testing.assert_close(made, exact, atol=1e-4, rtol=1e-4)
    not_turned = places.moved(one_layer, SAMPLE, exact, sink_tokens=sink_tokens, is_turned=False)
    assert not torch.allclose(not_turned, exact, atol=1e-2)
    torch.testing.assert_close(
        places.apart(one_layer, SAMPLE, exact), one_layer.kv(SAMPLE.context), atol=1e-4, rtol=1e-4
    )


def test_documents_apart_lack_what_blending_them_brings_back(model):
    exact = model.kv(SAMPLE.context)
    size = len(SAMPLE.context) // places.DOCUMENTS
    apart = places.apart(model, SAMPLE, exact)
    assert torch.allclose(apart[:, :, :, :size], exact[:, :, :, :size], atol=1e-4)
    assert not torch.allclose(apart[1:, :, :, size:], exact[1:, :, :, size:], atol=1e-2)
    whole = places.blend(model, SAMPLE, exact, share=1.0)
    torch.testing.assert_close(whole, exact, atol=1e-3, rtol=1e-3)
    drawn = [places.blend(model, SAMPLE, exact, share=0.15, is_random=True) for _ in range(2)]
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], places.blend(model, SAMPLE, exact, share=0.15))


def test_what_is_recovered_is_the_share_of_the_loss_that_is_gone():
    losses = {APART: (2.0, 3.0), "blended": (1.2, 2.4), "blended-at-random": (2.0, 2.6), "bf16": (1.0, 2.0)}
    rows = [
        Row(kind, text, 256, exact, loss, 0.0, 1.0)
        for kind, pair in losses.items()
        for text, exact, loss in zip(("a", "b"), (1.0, 2.0), pair, strict=True)
    ]
    found = {figure.name: (figure.value, figure.is_met, figure.note) for figure in recovered(rows)}
    # By chance both samples are the same one.
    assert found["blended: of the loss recovered"] == (0.7, True, "95 %: 0.6 to 0.8")
    assert found["blended-at-random: of the loss recovered"] == (0.2, True, "95 %: 0 to 0.4")
