"""Real vLLM engines for tests, in seconds: vLLM is imported once, and each engine is a process forked from there.

    with Forge(folder) as forge, forge.engine("gptoss", attached_to(node.address)) as engine:
        tokens, cached = engine.generate(prompt, 24)  # greedy; `cached` tokens of the prompt were not computed
        engine.reset()                                # its own prefix cache

An engine is of a family of `families`, whose model is written to the forge's folder when it is first wanted, or of the
model in a folder that is given. It runs a thread, has 128 MiB of KV cache and is up some three seconds after it was
asked for. An engine that does not start raises `StartFailed` with its traceback. Several may live at once, and threads
may use them at once, each thread one. Whatever happens, none is left: a forge ends its engines when it is closed, and
the kernel ends them when the process of the tests is gone.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import forked
from families import FAMILIES, ONLY_GROUPS, OPTIONS, Family, Group

_MAIN = Path(__file__).with_name("forge_engine.py")
_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_CI_ENV": "1",  # nothing is compiled or tried out first
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class StartFailed(AssertionError):
    """An engine did not start; its traceback, or the end of its log if it died."""


class Answer(NamedTuple):
    """`cached`: tokens of the prompt that were not computed. `transfer`: the answer's `kv_transfer_params`."""

    tokens: list[int]
    cached: int
    transfer: dict[str, Any] | None


def attached_to(node: str, **settings: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of an engine with `PdxConnector`, attached to the node at this address. A node may be
    silent for some seconds where the machine is busy; its answer counts all the same."""
    return {
        "kv_connector": "PdxConnector",
        "kv_connector_module_path": "pdx.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"node": node, "start_node": False, "lookup_s": 30.0, **settings},
    }


class Engine:
    """One engine. Its orders raise `AssertionError` with what went wrong in its process; see `Forge.engine`.

    `groups`: its cache groups, in vLLM's order. `num_blocks`: of all of them together.
    """

    def __init__(self, process: forked.Forked, log: Path) -> None:
        self.process = process
        self.log = log
        self.groups: list[Group] = []
        self.num_blocks = 0

    def begin(self, order: dict[str, Any]) -> None:
        """Have the engine made; see `forge_engine`."""
        try:
            told = self._ask(order)
        except AssertionError as error:
            raise StartFailed(str(error)) from None
        self.groups = [Group(*group) for group in told["groups"]]
        self.num_blocks = told["num_blocks"]

    def generate(self, prompt: Sequence[int], count: int, **options: Any) -> tuple[list[int], int]:
        """The `count` tokens that follow, and how many of the prompt's were not computed. See `generate_all`."""
        (answer,) = self.generate_all([prompt], count, **options)
        return answer.tokens, answer.cached

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        transfers: Sequence[dict[str, Any] | None] | None = None,
        salt: str = "",
    ) -> list[Answer]:
        """Several requests at once. `transfers`: the `kv_transfer_params` of each; `salt`: of the cache."""
        order = {
            "prompts": [list(prompt) for prompt in prompts],
            "count": count,
            "transfers": list(transfers or [None] * len(prompts)),
            "salt": salt,
        }
        return [Answer(*answer) for answer in self._ask({"do": "generate", **order})]

    def drafted(self) -> tuple[int, int]:
        """Tokens of speculative decoding so far: those that were proposed, and of these those that were accepted."""
        drafted, accepted = self._ask({"do": "drafted"})
        return drafted, accepted

    def reset(self) -> None:
        """Empty its own prefix cache."""
        assert self._ask({"do": "reset"}), "vLLM does not empty its prefix cache: something runs"

    def clear(self, group: int) -> int:
        """Set all that its prefix cache holds of a group to zero, in place; how many blocks that were."""
        return int(self._ask({"do": "clear", "group": group}))

    def spoil(self, group: int) -> None:
        """From now on, what PDX loads into blocks of this group is zeros; -1: of no group."""
        self._ask({"do": "spoil", "group": group})

    def load_whatever_it_costs(self) -> None:
        """As if nobody knew how long computing takes: what a tier has is loaded, though computing may be faster."""
        self._ask({"do": "load_whatever_it_costs"})

    def storm(
        self, prompts: Sequence[Sequence[int]], count: int, aborts: dict[int, int], *, preempt_at: int
    ) -> tuple[list[list[int] | None], int]:
        """All at once, some of them (by index) aborted after so many steps, and all that run preempted after so many,
        once none is being loaded: the tokens of the others, and how often one was preempted."""
        order = {"prompts": [list(prompt) for prompt in prompts], "count": count, "aborts": aborts}
        told = self._ask({"do": "storm", **order, "preempt_at": preempt_at})
        return told["answers"], told["preempted"]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(20)

    def close(self) -> None:
        """Let it shut down and wait until it is gone; what takes long is killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self.process.stdout.close()

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order) + "\n")
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the engine is gone: {self.process.wait(20)}\n{_tail(self.log)}")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["result"]


class Forge:
    """Where engines come from. `folder`: for models and logs; it must be there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._origin = forked.Origin(["forge_engine"], {**_VARIABLES, "VLLM_CACHE_ROOT": str(folder / "cache")})
        self._engines: list[Engine] = []
        self._count = 0

    def __enter__(self) -> Forge:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in list(self._engines):
            self._end(engine)
        self._origin.close()

    @contextlib.contextmanager
    def engine(
        self, model: str | Path, kv_transfer_config: dict[str, Any] | None = None, **options: Any
    ) -> Iterator[Engine]:
        """An engine of this family, or of the model in this folder, for as long as the block runs.

        `options`: of vLLM's engine, where they differ from the family's.

        :raises StartFailed: it does not start.
        """
        engine = self.start(model, kv_transfer_config, **options)
        try:
            yield engine
            engine.close()
        finally:
            self._end(engine)

    def start(self, model: str | Path, kv_transfer_config: dict[str, Any] | None = None, **options: Any) -> Engine:
        """As `engine`, which the caller or the forge closes."""
        self._count += 1
        family = model if isinstance(model, str) else None
        log = self._folder / f"{self._count}-{Path(model).name}.log"
        order = {
            "family": family,
            "folder": str(self._folder / family if family else model),
            "options": _options(FAMILIES[family] if family else None, options),
            "transfer": kv_transfer_config,
        }
        with log.open("w") as stream:
            streams = (subprocess.PIPE, subprocess.PIPE, stream)
            process = forked.Forked([str(_MAIN)], streams, new_session=True, parent=self._origin)
        engine = Engine(process, log)
        self._engines.append(engine)
        try:
            engine.begin(order)
        except BaseException:
            self._end(engine)
            raise
        return engine

    def groups_of(self, family: str, **options: Any) -> Any:
        """vLLM's `KVCacheConfig` of a family, also of those in `ONLY_GROUPS`, in a second and without an engine.

        `options`: as of `engine`. It is vLLM's own object: who asks has vLLM imported, or this does.

        :raises StartFailed: vLLM makes none.
        """
        self._count += 1
        folder = self._folder / f"{self._count}-{family}"
        folder.mkdir()
        log, result = folder / "log", folder / "result"
        order = {
            "family": family,
            "folder": str(folder),
            "result": str(result),
            "options": _options({**FAMILIES, **ONLY_GROUPS}[family], options),
        }
        with log.open("w") as stream:
            arguments = [str(_MAIN.with_name("forge_groups.py")), json.dumps(order)]
            streams = (subprocess.DEVNULL, stream, stream)
            process = forked.Forked(arguments, streams, new_session=True, parent=self._origin)
        try:
            code = process.wait(120)
        finally:
            process.kill()
        if code != 0:
            raise StartFailed(_tail(log))
        return pickle.loads(result.read_bytes())

    def _end(self, engine: Engine) -> None:
        self._engines.remove(engine)
        engine.kill()
        engine.close()


def _options(family: Family | None, options: dict[str, Any]) -> dict[str, Any]:
    return {**OPTIONS, **(family.options if family else {}), **options}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
