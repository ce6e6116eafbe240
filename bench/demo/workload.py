"""The demo's requests: cold prompts of four lengths, a conversation's second turn, and eight at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pydoc_data.topics import topics
from typing import Any

from pdx.bench.harness import ask

CHANGED_AT = 5  # for the tiny model's prompts that differ in one early token
TEXT = """the cache moves while layers are still being computed and every token of a prompt is needed for the next one
so nothing may be lost on its way from the engine that reads to the one that writes"""
FIRST, SECOND = "first turn (chat)", "second turn (chat)"


@dataclass(frozen=True, slots=True)
class Request:
    """One request, ready for any OpenAI server of its model. `question`: shown with its answer."""

    name: str
    path: str
    body: dict[str, Any]
    question: str = ""

    def is_whole(self, output_tokens: int) -> bool:
        """Whether an answer has the full length."""
        return output_tokens == self.body["max_tokens"] or (output_tokens > 0 and not self.body["ignore_eos"])


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to one model. `kv_bytes`: per token, in float32."""

    model: str
    kv_bytes: int
    cold: list[tuple[Request, Request]]  # each with a variant in which a small change affects the answer
    first: Request
    follow_up: str  # what the user says in the second turn
    together: list[Request]

    def rounds(self, answers: dict[str, str], *, with_changed: bool = False) -> Iterator[list[Request]]:
        """Groups of requests to send at the same time. `answers` must have the first turn's answer before the second
        turn."""
        for request, changed in self.cold:
            yield [request]
            if with_changed:
                yield [changed]
        yield [self.first]
        yield [self.second_turn(answers[self.first.name])]
        yield self.together

    def second_turn(self, answer: str) -> Request:
        """The conversation's second turn, after the first turn's `answer`."""
        body = dict(self.first.body)
        said = [("assistant", answer), ("user", self.follow_up)]
        body["messages"] = [*body["messages"], *({"role": role, "content": text} for role, text in said)]
        return Request(SECOND, self.first.path, body, self.first.question and self.follow_up)


def completion(name: str, prompt: str, model: str = "tiny", tokens: int = 48) -> Request:
    """Continue `prompt` greedily."""
    return Request(name, "/v1/completions", ask.completion(model, prompt, tokens))


def chat(name: str, says: str, model: str = "tiny", tokens: int = 48, question: str = "") -> Request:
    """Answer greedily; the answer to a `question` ends where the model ends it."""
    body = ask.completion(model, "", tokens)
    del body["prompt"]
    body |= {"messages": [{"role": "user", "content": says}], "ignore_eos": not question}
    return Request(name, "/v1/chat/completions", body, question)


def tiny() -> Workload:
    """For the model with random weights, whose tokens are single characters."""
    cold = [(f"{length:,} tokens", words(length, seed=length)) for length in (40, 300, 1000, 4000)]
    shared = words(600, seed=3)
    prompts = [shared + words(150 * n, seed=10 + n) for n in range(1, 5)]
    prompts += [words(200 * n, seed=20 + n) for n in range(1, 5)]
    return Workload(
        "tiny",
        64 << 10,
        [
            (
                completion(name, text),
                completion(f"{name}, one changed", f"{text[:CHANGED_AT]}#{text[CHANGED_AT + 1 :]}"),
            )
            for name, text in cold
        ],
        chat(FIRST, words(1000, seed=1)),
        words(300, seed=2),
        [completion(f"at once, {n} of 8", prompt) for n, prompt in enumerate(prompts, 1)],
    )


def words(length: int, seed: int) -> str:
    """`length` characters of random words."""
    draw = random.Random(seed)
    known = TEXT.split()
    return " ".join(draw.choice(known) for _ in range(length))[:length]


# ---- what a person can read -----------------------------------------------------------------------

LAST_LINE = "This page was written by"


def smollm2() -> Workload:
    """Questions about pages of the documentation that comes with Python."""
    pages = {
        "a line": "",
        "a page": topics["assert"],
        "a longer page": topics["with"],
        "the longest page": topics["try"],
    }
    cold = [(signed(name, text, "Anna"), signed(f"{name}, changed", text, "Boris")) for name, text in pages.items()]
    questions = [
        ("for", "What does the for statement do?"),
        ("for", "What happens to the loop variable after the loop?"),
        ("for", "What does the else clause do?"),
        ("for", "What does the break statement do?"),
        ("global", "What does the global statement do?"),
        ("yield", "What is a yield statement?"),
        ("lists", "What is a list display?"),
        ("while", "What does the while statement do?"),
    ]
    together = [asked(f"at once, {n} of 8", *each) for n, each in enumerate(questions, 1)]
    first = asked(FIRST, "return", "What does the return statement do?")
    return Workload("smollm2", 45 << 10, cold, first, "And what is returned when there is no expression?", together)


def signed(name: str, page: str, author: str) -> Request:
    """A page that names its author some way before its end, where its reader has to find it."""
    cut = max(0, page.rfind("\n\n", 0, -800))  # a paragraph's end
    text = f"{page[:cut]}\n\n{LAST_LINE} {author}.\n\n{page[cut:].strip()}\n\n{LAST_LINE}"
    return replace(completion(name, text, "smollm2", 24), question=LAST_LINE)


def asked(name: str, page: str, question: str) -> Request:
    """A page followed by a question."""
    return chat(name, f"{topics[page]}\n\n{question}", "smollm2", 64, question)


WORKLOADS = {"tiny": tiny, "smollm2": smollm2}
