"""Four documents asked about in three orders: docs/tutorials/chat-and-documents.md.

python docs/examples/three_orders.py http://127.0.0.1:8100 MODEL
"""

import json
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from urllib.request import Request, urlopen

from transformers import AutoTokenizer

from pdx.blend.blender import Blender
from pdx.config import default_node

URL, MODEL = sys.argv[1:]
NOTES = {
    "with": "Anna keeps her boat in Genoa.",
    "class": "Boris plays the violin.",
    "subscriptions": "Clara grows tomatoes.",
    "raise": "David drinks green tea.",
}
ORDERS = ("with class subscriptions raise", "raise subscriptions class with", "subscriptions with raise class")
QUESTION = "David drinks"


def ask(prompt: list[int], hints: dict[str, Any], max_tokens: int = 8) -> str:
    """How many tokens were computed for it, how long that took, and the answer."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stop": ["\n"]}
    body["kv_transfer_params"] = {"pdx_hints": {"version": 1, **hints}}
    began = time.monotonic()
    request = Request(f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        told = json.load(answer)
    computed = len(prompt) - told["usage"]["prompt_tokens_details"]["cached_tokens"]
    text = told["choices"][0]["text"]
    return f"{computed:5} tokens computed, {time.monotonic() - began:4.1f} s: {QUESTION}{text}"


tokenizer = AutoTokenizer.from_pretrained(MODEL)
documents = {}
for name, note in NOTES.items():
    text = f"{topics[name].strip()}\n\n{note}\n\n"
    Path(f"{name}.txt").write_text(text)
    documents[name] = tokenizer(text).input_ids
    ask(documents[name], {"priority": 1}, max_tokens=1)  # once, as a prompt of its own

with Blender.at(default_node(), Path(MODEL)) as blender:
    for order in ORDERS:
        texts = [documents[name] for name in order.split()]
        prompt = sum(texts, []) + tokenizer(QUESTION).input_ids
        print(order)  # noqa: T201
        for share in (0.15, 0.0):
            began = time.monotonic()
            made = blender.blend(texts, share)
            print(f"  {made.found} of {made.tokens} tokens known, blended in {time.monotonic() - began:.1f} s")  # noqa: T201
            print(f"  {share:4.0%} again {ask(prompt, {'reuse': made.reuse})}")  # noqa: T201
        print(f"  exact      {ask(prompt, {})}")  # noqa: T201
