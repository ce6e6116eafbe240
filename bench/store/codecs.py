"""Codecs on the KV of real forward passes: ratio, speed, what a loss does to the model, and time on a slow wire.

    python -m pdx.bench.store.codecs [--steps 300] [--prompts 4] [--mib 64] [--write]

Two models. "random": the test model (`pdx.testing.tiny_llama`), whose weights nobody has trained: its KV is noise of
one size for each head. "trained": a byte-level Llama of four layers, trained for some minutes of one core on this
repository's documents, and asked about pages that it has not seen. Both are small: what a codec does to the KV of a
large model this does not say. Their KV is computed by the reference engine's model, in bf16 and in fp32. The KV named
fp16 is that of fp32, rounded, and fp8 that of bf16, as caches of these types would have it.

A model that goes on behind a decoded prompt is compared with itself behind the exact one: logits under the tokens that
the exact one chose, and the tokens that each chooses. One thread encodes and decodes. The wire is a channel `tcp`
through a relay of 1 Gb/s in this process. The last line is JSON; `--write`: into results/codecs.json, too.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from pdx.bench.harness.report import RESULTS, ROOT, Figure, at_most, console, plain, publish, show_rows
from pdx.bench.reference.model import EPSILON, Batch, Model, PagedKv, Shapes
from pdx.bench.systems.line import Relay
from pdx.memory.form import Form
from pdx.store.codecs.codec import LOSSLESS, codec_of, decode_slice, encode_slice
from pdx.testing.tiny_llama import make_model
from pdx.transports.channel import TOKEN_BYTES, Channel, Listener, Memory, Piece
from pdx.transports.tcp import Address, TcpRegion

BLOCK, CHUNK = 16, 256
PROMPT, GOES_ON = 1024, 64  # tokens
TRAINED = Shapes(4, 192, 4, 2, 64, 512, 256, rope_theta=10_000.0)
RANDOM = Shapes(8, 512, 8, 8, 128, 512, 320, rope_theta=10_000.0)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIRE_BYTES_S = 125_000_000
HELD_OUT = ("remote.md", "policies.md", "glossary.md")
REPEATS = 5
CPU = torch.device("cpu")


# ---- models ---------------------------------------------------------------------------------


def random_model(dtype: torch.dtype) -> Model:
    """The test model, as its file has it."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        weights = load_file(Path(folder, "model.safetensors"))
    own = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    layers = []
    for layer in range(RANDOM.layers):
        at = f"layers.{layer}"
        qkv = torch.cat([own[f"{at}.self_attn.{name}_proj.weight"] for name in "qkv"])
        gate_up = torch.cat([own[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
        layers.append([qkv, own[f"{at}.self_attn.o_proj.weight"], gate_up, own[f"{at}.mlp.down_proj.weight"]])
    shapes = replace(RANDOM, vocab=own["embed_tokens.weight"].shape[0])
    return with_weights(shapes, dtype, own["embed_tokens.weight"], layers, own["lm_head.weight"])


def with_weights(
    shapes: Shapes, dtype: torch.dtype, embedding: Tensor, layers: list[list[Tensor]], head: Tensor
) -> Model:
    """The reference engine's model, with these weights."""
    model = Model(shapes, 0, dtype, CPU)
    model._embedding = embedding.detach().to(dtype)
    model._layers = [[one.detach().to(dtype) for one in layer] for layer in layers]
    model._head = head.detach().to(dtype)
    return model


def texts() -> tuple[bytes, bytes]:
    """The documents that are learned, and those that are held out."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    learned = b"\n".join(page.read_bytes() for page in pages if page.name not in HELD_OUT)
    return learned, b"\n".join((ROOT / "docs" / name).read_bytes() for name in HELD_OUT)


def train(total: int) -> tuple[tuple[Tensor, list[list[Tensor]], Tensor], float]:
    """Weights of a byte-level model, and bits per byte of text that it has not seen."""
    torch.manual_seed(0)
    learned, held_out = (torch.tensor(list(text)) for text in texts())
    shapes = TRAINED
    inner, content = shapes.heads * shapes.head_dim, 2 * shapes.kv_heads * shapes.head_dim

    def draw(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) / math.sqrt(columns)).requires_grad_()

    sizes = (
        (inner + content, shapes.hidden),
        (shapes.hidden, inner),
        (2 * shapes.ffn, shapes.hidden),
        (shapes.hidden, shapes.ffn),
    )
    layers = [[draw(*size) for size in sizes] for _ in range(shapes.layers)]
    embedding = torch.randn(shapes.vocab, shapes.hidden).requires_grad_()
    head = draw(shapes.vocab, shapes.hidden)
    optimizer = torch.optim.AdamW(
        [embedding, head, *(one for layer in layers for one in layer)], 2e-3, weight_decay=0.01
    )

    def loss_of(text: Tensor, count: int, length: int) -> Tensor:
        starts = torch.randint(len(text) - length - 1, (count,))
        rows = torch.stack([text[start : start + length + 1] for start in starts])
        logits = dense(shapes, embedding, layers, head, rows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    for step in range(total):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 0.1 + (total - step) / total)
        optimizer.zero_grad()
        loss_of(learned, 8, 192).backward()
        optimizer.step()
    with torch.no_grad():
        bits = statistics.mean(float(loss_of(held_out, 8, 512)) for _ in range(4)) / math.log(2)
    return (embedding, layers, head), bits


def dense(shapes: Shapes, embedding: Tensor, layers: list[list[Tensor]], head: Tensor, tokens: Tensor) -> Tensor:
    """The same model as the reference engine's, for many rows at once and with gradients."""
    hidden = embedding[tokens]
    ones = torch.ones(shapes.hidden)
    frequencies = shapes.rope_theta ** -(torch.arange(0, shapes.head_dim, 2) / shapes.head_dim)
    angles = torch.arange(tokens.shape[1])[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()

    def turned(heads: Tensor) -> Tensor:
        left, right = heads.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)

    for qkv, out, gate_up, down in layers:
        normed = functional.rms_norm(hidden, (shapes.hidden,), ones, EPSILON)
        projected = functional.linear(normed, qkv).unflatten(-1, (-1, shapes.head_dim)).transpose(1, 2)
        queries, keys, values = projected.split([shapes.heads, shapes.kv_heads, shapes.kv_heads], dim=1)
        attended = functional.scaled_dot_product_attention(
            turned(queries), turned(keys), values, is_causal=True, enable_gqa=True
        )
        hidden = hidden + functional.linear(attended.transpose(1, 2).flatten(2), out)
        normed = functional.rms_norm(hidden, (shapes.hidden,), ones, EPSILON)
        gate, up = functional.linear(normed, gate_up).chunk(2, dim=-1)
        hidden = hidden + functional.linear(functional.silu(gate) * up, down)
    return functional.linear(functional.rms_norm(hidden, (shapes.hidden,), ones, EPSILON), head)


# ---- KV -------------------------------------------------------------------------------------


class Run:
    """A model behind one prompt: its cache, whose first pages can be replaced."""

    def __init__(self, model: Model, dtype: torch.dtype, prompt: Sequence[int]) -> None:
        self.model, self.prompt = model, list(prompt)
        count = (PROMPT + GOES_ON) // BLOCK + 2
        self.kv = PagedKv(model.shapes, count, BLOCK, "LBHNC", dtype, CPU)
        self.blocks = list(range(1, count))
        self.first = self.step(self.prompt, 0)

    def step(self, tokens: Sequence[int], start: int) -> Tensor:
        """The logits behind these."""
        blocks = self.blocks[: -(-(start + len(tokens)) // BLOCK)]
        return self.model.forward([Batch.of([(list(tokens), start, blocks)], CPU)], self.kv)[0].float()

    def pages(self, layer: int) -> Tensor:
        """Of the whole prompt: [blocks, heads, tokens, 2 dim], as they lie in memory."""
        return self.kv.layers[layer][self.blocks[0] : self.blocks[0] + PROMPT // BLOCK].transpose(1, 2)

    def slices(self) -> list[memoryview]:
        """Of chunks: one layer of 256 tokens each."""
        per_chunk = CHUNK // BLOCK
        whole = [self.pages(layer).contiguous().view(torch.uint8) for layer in range(self.model.shapes.layers)]
        return [
            memoryview(pages[at : at + per_chunk].numpy()).cast("B")
            for pages in whole
            for at in range(0, PROMPT // BLOCK, per_chunk)
        ]

    def form(self, codec: str, elements: str) -> Form:
        """How a chunk of it is stored with a loss."""
        shapes = self.model.shapes
        return Form(codec, elements, (1, shapes.kv_heads, BLOCK, 2, shapes.head_dim))  # type: ignore[arg-type]

    def go_on(self, chosen: Sequence[int] | None = None) -> tuple[list[int], Tensor]:
        """The tokens that it chooses and its logits before each, behind the prompt: behind `chosen` ones, or its own.

        The last token of the prompt is computed anew, as an engine does."""
        tokens, rows = [], []
        before = self.prompt[-1]
        for at in range(GOES_ON):
            logits = self.step([before], PROMPT - 1 + at)
            rows.append(logits)
            tokens.append(int(logits.argmax()))
            before = tokens[-1] if chosen is None else chosen[at]
        return tokens, torch.stack(rows)


def through(codec_name: str, data: memoryview) -> tuple[int, bytearray]:
    """Encoded bytes, and what comes back."""
    into, back = bytearray(2 * len(data) + 64), bytearray(len(data))
    used = encode_slice(codec_of(codec_name), data, memoryview(into), lambda: None)
    decode_slice(codec_of(codec_name), memoryview(into)[:used], memoryview(back), lambda: None)
    return used, back


@dataclass(frozen=True, slots=True)
class Row:
    """One codec on one model's KV; rates are of bytes that are not encoded, by one thread."""

    model: str
    kv: str
    codec: str
    ratio: float
    encode_gb_s: float
    decode_gb_s: float


@dataclass(frozen=True, slots=True)
class Loss:
    """What a codec does to the model; logit errors over the standard deviation of a position's logits."""

    model: str
    kv: str
    codec: str
    max_error: float
    mean_error: float
    same_choice: float  # of the positions, behind the same tokens
    first_other: str  # token, of each prompt, when it goes on by itself; "-": none of 64


def seconds(call: Callable[[], object]) -> float:
    """The best of some: the machine may be somebody else's at times."""
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


def measured(model: str, kv: str, codec: str, slices: Sequence[memoryview]) -> Row:
    """Ratio and speed on these slices."""
    room = [bytearray(2 * len(each) + 64) for each in slices]
    sizes = [0] * len(slices)

    def encode() -> None:
        for at, data in enumerate(slices):
            sizes[at] = encode_slice(codec_of(codec), data, memoryview(room[at]), lambda: None)

    back = [bytearray(len(each)) for each in slices]

    def decode() -> None:
        for at, into in enumerate(back):
            decode_slice(codec_of(codec), memoryview(room[at])[: sizes[at]], memoryview(into), lambda: None)

    nbytes = sum(map(len, slices))
    encode_s, decode_s = seconds(encode), seconds(decode)
    if codec == LOSSLESS and any(bytes(each) != bytes(data) for each, data in zip(back, slices, strict=True)):
        raise RuntimeError("a lossless codec has lost something")
    name = codec.partition(":")[0]
    return Row(
        model,
        kv,
        name,
        round(nbytes / sum(sizes), 3),
        round(nbytes / encode_s / 1e9, 2),
        round(nbytes / decode_s / 1e9, 2),
    )


def losses(model: str, kv: str, codecs: Sequence[str], runs: Sequence[Run]) -> list[Loss]:
    """What each codec does to these, one after the other."""
    exact = [run.go_on() for run in runs]
    kept = [[run.pages(layer).clone() for layer in range(run.model.shapes.layers)] for run in runs]
    found = []
    for codec in codecs:
        worst, means, same, firsts = 0.0, [], [], []
        for run, (tokens, logits), pages in zip(runs, exact, kept, strict=True):
            for layer, exact_pages in enumerate(pages):
                data = memoryview(exact_pages.contiguous().view(torch.uint8).numpy()).cast("B")
                name = LOSSLESS if codec == LOSSLESS else str(run.form(codec, kv))
                back = torch.frombuffer(through(name, data)[1], dtype=exact_pages.dtype).view(exact_pages.shape)
                run.pages(layer).copy_(back)
            choices, others = run.go_on(tokens)
            error = (others - logits).abs() / logits.std(dim=1, keepdim=True)
            worst = max(worst, float(error.max()))
            means.append(float(error.mean()))
            same += [a == b for a, b in zip(choices, tokens, strict=True)]
            own, _ = run.go_on()
            firsts.append(next((str(at) for at, (a, b) in enumerate(zip(own, tokens, strict=True)) if a != b), "-"))
            for layer, exact_pages in enumerate(pages):
                run.pages(layer).copy_(exact_pages)
        share = sum(same) / len(same)
        found.append(
            Loss(model, kv, codec, round(worst, 4), round(statistics.mean(means), 5), round(share, 4), " ".join(firsts))
        )
    return found


# ---- wire -----------------------------------------------------------------------------------


@contextlib.contextmanager
def wire(codec: str, nbytes: int) -> Iterator[tuple[Channel, Listener, Memory, Memory, threading.Event]]:
    """A channel over a line of 1 Gb/s between two regions of so many bytes."""
    ours, theirs = Memory(memoryview(bytearray(nbytes))), Memory(memoryview(bytearray(nbytes)))
    wake = threading.Event()
    writer, reader = TcpRegion.register(ours, wake=wake), TcpRegion.register(theirs, wake=wake)
    writer.codec = codec
    token = secrets.token_bytes(TOKEN_BYTES)
    remote = reader.listen().invite(token)
    reader.listen().grant(token, 0, nbytes)
    address = msgspec.msgpack.decode(remote.detail, type=Address)
    line = Relay(address.port, rate=WIRE_BYTES_S, both_ways=True)
    near = msgspec.msgpack.encode(msgspec.structs.replace(address, port=line.port))
    try:
        yield writer.connect(msgspec.structs.replace(remote, detail=near)), reader.listen(), ours, theirs, wake
    finally:
        writer.close()
        line.close()
        reader.close()


def wire_s(codec: str, data: bytes) -> float:
    """Until all of it was acknowledged, written in pieces of 8 MiB as a node does."""
    found = []
    with wire(codec, len(data)) as (channel, listener, ours, theirs, wake):
        ours.view[:] = data
        for _ in range(3):
            theirs.view[:] = bytes(len(data))
            begin = time.perf_counter()
            step = 8 << 20
            transfers = [
                channel.write([Piece(at, at, min(step, len(data) - at))], b"") for at in range(0, len(data), step)
            ]
            while not all(each.poll() for each in transfers):
                wake.wait(0.05)
                wake.clear()
                listener.take()
            found.append(time.perf_counter() - begin)
            if bytes(theirs.view) != data:
                raise RuntimeError("other bytes arrived")
    return statistics.median(found)


# ---- all ------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Codecs on real KV; see the module.")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--mib", type=int, default=64, help="over the wire")
    parser.add_argument("--write", action="store_true", help="keep the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weights, bits = train(arguments.steps)
    console.print(f"trained for {arguments.steps} steps: {bits:.2f} bits per byte of pages that it has not seen")
    held_out = list(texts()[1])
    generator = torch.Generator().manual_seed(1)
    rows: list[Row] = []
    lossy: list[Loss] = []
    data = b""
    for name in ("random", "trained"):
        for elements, dtype in DTYPES.items():
            model = random_model(dtype) if name == "random" else with_weights(TRAINED, dtype, *weights)
            if name == "random":
                prompts = [
                    torch.randint(0x20, 0x7F, (PROMPT,), generator=generator).tolist() for _ in range(arguments.prompts)
                ]
            else:
                step = (len(held_out) - PROMPT) // arguments.prompts
                prompts = [held_out[at * step : at * step + PROMPT] for at in range(arguments.prompts)]
            runs = [Run(model, dtype, prompt) for prompt in prompts]
            slices = [each for run in runs for each in run.slices()]
            rows += [measured(name, elements, LOSSLESS, slices)]
            rows += [measured(name, elements, str(runs[0].form(codec, elements)), slices) for codec in ("fp8", "int8")]
            other, kind = ("fp8", torch.float8_e4m3fn) if elements == "bf16" else ("fp16", torch.float16)
            rounded = [torch.frombuffer(each, dtype=dtype).to(kind).view(torch.uint8) for each in slices]
            rows.append(measured(name, other, LOSSLESS, [memoryview(each.numpy()) for each in rounded]))
            if (name, elements) == ("trained", "bf16"):
                data = b"".join(slices)
            lossy += losses(name, elements, ("fp8", "int8"), runs)
    show_rows(rows, "codecs, one thread")
    show_rows(lossy, f"{arguments.prompts} prompts of {PROMPT} tokens, and {GOES_ON} behind each")
    data = (data * (1 + (arguments.mib << 20) // len(data)))[: arguments.mib << 20]
    times = {codec: wire_s(codec, data) for codec in ("none", LOSSLESS)}
    ratio = next(row.ratio for row in rows if (row.model, row.kv, row.codec) == ("trained", "bf16", LOSSLESS))
    saved = times["none"] / times[LOSSLESS]
    figures: list[Figure] = [
        *(plain(f"{row.model} {row.kv} {row.codec}: ratio", row.ratio, "x") for row in rows),
        *(plain(f"{each.model} {each.kv} {each.codec}: same choice", each.same_choice, "") for each in lossy),
        plain("1 Gb/s, plain", len(data) / times["none"] / 1e6, "MB/s"),
        plain("1 Gb/s, lossless", len(data) / times[LOSSLESS] / 1e6, "MB/s"),
        plain("1 Gb/s: times faster", saved, "x", f"the ratio is {ratio}"),
        at_most("1 Gb/s: wire time over what the ratio would have", ratio / saved, "x", 1.1),
    ]
    details = {
        "rows": [asdict(row) for row in rows],
        "losses": [asdict(each) for each in lossy],
        "bits_per_byte": bits,
        "steps": arguments.steps,
    }
    with tempfile.TemporaryDirectory() as nowhere:
        folder = RESULTS if arguments.write else Path(nowhere)
        publish("codecs", "codecs on real KV", figures, details, folder=folder)


if __name__ == "__main__":
    main()
