"""The test model does what it is for: text is tokens, and every token of a long prompt matters. Small shapes only."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch makes the weights")
pytest.importorskip("safetensors", reason="safetensors writes them")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers writes the tokenizer")

from pdx.bench.harness.tiny_llama import make_model  # noqa: E402

SHAPE = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "intermediate": 128}
# In a process of its own: transformers warns about much, and warnings are errors here.
GENERATE = """
import json, random, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, length, answer = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(2)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
def generate(text):
    tokens = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**tokens, max_new_tokens=answer, do_sample=False)[0, tokens.input_ids.shape[1]:]
    return out.tolist(), tokenizer.decode(out)
found = []
for seed in range(6):
    draw = random.Random(seed)
    text = " ".join(draw.choice("one two three four five six seven".split()) for _ in range(length))[:length]
    changed = text[:5] + "#" + text[6:]
    found.append([*generate(text), *generate(changed)])
chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
print(json.dumps({"answers": found, "chat": tokenizer(chat).input_ids}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture(scope="module")
def generated(model):
    pytest.importorskip("transformers", reason="transformers runs the model")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", GENERATE, model, "900", "24"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_same_arguments_give_the_same_bytes(model, tmp_path):
    again, other = make_model(tmp_path / "again", **SHAPE), make_model(tmp_path / "other", **SHAPE, seed=1)
    names = sorted(path.name for path in model.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    digests = [
        {name: hashlib.sha256((folder / name).read_bytes()).digest() for name in names}
        for folder in (model, again, other)
    ]
    assert digests[0] == digests[1]
    assert digests[0]["model.safetensors"] != digests[2]["model.safetensors"]


def test_a_token_is_a_byte(model):
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "".join(map(chr, range(1, 256))) + "\N{SNOWMAN} 100\u00a0%\r\n\n  end"
    tokens = tokenizer.encode(text)
    assert tokens.ids == list(text.encode())
    assert tokenizer.decode(tokens.ids) == text
    assert [tokenizer.token_to_id(name) for name in ("<|pad|>", "<|tool|>")] == [256, 262]


@pytest.mark.long  # a minute of computing
def test_answers_are_one_character_per_token_vary_and_rest_on_each_early_token(generated):
    for tokens, text, _, changed in generated["answers"]:
        assert tokens == list(text.encode())
        assert (text.isprintable(), len(set(tokens)) >= 6, text != changed) == (True,) * 3
    assert len({text for _, text, *_ in generated["answers"]}) == len(generated["answers"])
    assert generated["chat"] == [260, *b"Hi", 261], "the template marks the turns"
