"""`pdx blend`: combine the KV of documents into that of a prompt, and print the request that uses it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import click

from pdx.cli.options import FOLDER, node_option, option
from pdx.config import default_node
from pdx.errors import ConfigError


@click.command()
@click.argument("documents", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@option("--model", required=True, type=FOLDER, help="Folder with the engine's weights in Hugging Face format.")
@option("--question", default="", help="Text after the documents.")
@option("--share", default=0.15, type=click.FloatRange(0, 1), help="Share of tokens to recompute.")
@option("--salt", default="", help="cache_salt of the requests.")
@option("--max-tokens", default=64, type=click.IntRange(1), help="Length limit of the answer.")
@option("--engine", default="", help="The engine's name, URL or layout, if engines of several models are attached.")
@node_option
def blend(
    documents: tuple[Path, ...],
    model: Path,
    question: str,
    share: float,
    salt: str,
    max_tokens: int,
    engine: str,
    address: str | None,
) -> None:
    """Blend the KV of text files, in this order, at a node, for requests that begin with them (experimental).

    A document that the engine has already seen as a prompt of its own is reused; others are computed here. Prints the
    body of a request to /v1/completions that finds the result:

    pdx blend a.txt b.txt --model DIR --question 'Which is newer?' | curl --json @- URL/v1/completions
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("pdx blend computes with transformers and PyTorch, as vLLM brings them")
    from transformers import AutoTokenizer

    from pdx.blend.blender import Blender

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer(file.read_text()).input_ids for file in documents]
    tail = tokenizer(question, add_special_tokens=False).input_ids if question else []
    with Blender.at(address or default_node(), model, engine=engine) as blender:
        made = blender.blend(texts, share, salt=salt)
    again = f", {made.share:.0%} of them computed again" if made.is_new and made.found else ""
    click.echo(f"{made.tokens:,} tokens are there, {made.found:,} of them known{again}", err=True)
    body: dict[str, object] = {
        "prompt": [token for text in texts for token in text] + tail,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    if salt:
        body["cache_salt"] = salt
    click.echo(json.dumps({**body, "kv_transfer_params": {"pdx_hints": {"version": 1, "reuse": made.reuse}}}))
