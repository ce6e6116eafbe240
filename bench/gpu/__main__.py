"""The benches that need a GPU: `python -m pdx.bench.gpu [--only kernels,pinned,llama,hook]`.

`--repeats` and `--prompts` shorten `--only llama` where GPU time is limited.

Each section runs in a process of its own and writes results/gpu-SECTION.json. Figures are medians of at least 20 runs,
unless `--repeats` is lower, each beside its reference. A missed goal is shown but is not an error. Exit status 1: a
section broke; 2: there is no GPU here. A section is skipped, with a message, if a package that it needs is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdx.bench.harness.report import RESULTS, ROOT, console, publish
from pdx.cuda.gpu import why_no_gpu

NO_GPU, BROKEN = 2, 1
KERNEL_PACKAGES = ("torch", "triton", "numpy")
NODE_PACKAGES = (*KERNEL_PACKAGES, "xxhash", "zmq")


@dataclass(frozen=True, slots=True)
class Section:
    """One subject: a function of a module, from a `Bed` to `Findings`, and the packages that it imports."""

    module: str
    function: str
    packages: tuple[str, ...]


SECTIONS = {
    "kernels": Section("pdx.bench.gpu.kernels", "kernels", KERNEL_PACKAGES),
    "pinned": Section("pdx.bench.gpu.kernels", "pinned", KERNEL_PACKAGES),
    "llama": Section("pdx.bench.gpu.llama", "llama", NODE_PACKAGES),
    "hook": Section("pdx.bench.gpu.hook", "hook", NODE_PACKAGES),
}


def why_no_bed() -> str:
    """Why nothing can be measured on this machine; empty if it can."""
    if why := why_no_gpu():
        return f"pdx.bench.gpu needs an NVIDIA GPU: {why}"
    import torch

    if not torch.cuda.is_available():
        return f"pdx.bench.gpu needs PyTorch for CUDA: torch {torch.__version__} sees no GPU"
    return ""


def why_not(section: Section) -> str:
    """Why the section cannot run, as far as packages go; empty if it can."""
    missing = [name for name in section.packages if importlib.util.find_spec(name) is None]
    return f"it needs {', '.join(missing)}: pip install '.[gpu]'" if missing else ""


def run_here(name: str, bed_name: str, folder: Path, settings: Mapping[str, Any]) -> None:
    """Run one section in this process with these settings of its own, and publish its findings."""
    from pdx.bench.gpu.bed import bed, gpu_facts

    section = SECTIONS[name]
    measure = getattr(importlib.import_module(section.module), section.function)
    with bed(bed_name) as the_bed:
        found = measure(the_bed, **settings)
        facts = gpu_facts(the_bed.gpu, bed_name)
    publish(f"gpu-{name}", found.title, found.figures, found.details, facts=facts, folder=folder)


def run_all(names: Sequence[str], bed_name: str, folder: Path, extra: Sequence[str] = ()) -> int:
    """Run each section in a process of its own, because a kernel's error leaves its process without a usable GPU.

    `extra`: further arguments for all sections. Returns the exit status.
    """
    broken = []
    for name in names:
        console.rule(f"gpu: {name}")
        if why := why_not(SECTIONS[name]):
            console.print(f"{name} is skipped: {why}")
            continue
        command = [sys.executable, "-m", "pdx.bench.gpu", "--here", name, "--bed", bed_name, "--out", str(folder)]
        command += extra
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            broken.append(name)
    for name in broken:
        console.print(f"{name} broke")
    return BROKEN if broken else 0


def _sections(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}: known are {', '.join(SECTIONS)}")
    return names


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return number


def _prompts(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdx.bench.gpu", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--only", type=_sections, default=list(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--repeats", type=_positive, help="measured prompts of each case of llama, instead of 21")
    parser.add_argument("--prompts", type=_prompts, help="lengths of llama's prompts, instead of 8192,32768")
    parser.add_argument("--bed", choices=("real", "toy"), default="real", help="toy: no GPU, no numbers; for tests")
    parser.add_argument("--here", choices=SECTIONS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.bed == "toy" and chosen.out == RESULTS:
        parser.error("what the toy gives is no result: --out FOLDER")
    own = {name: getattr(chosen, name) for name in ("repeats", "prompts") if getattr(chosen, name) is not None}
    if own and [chosen.here or ",".join(chosen.only)] != ["llama"]:
        parser.error("--repeats and --prompts are for --only llama")
    if chosen.bed == "real" and (why := why_no_bed()):
        print(why, file=sys.stderr)
        return NO_GPU
    if chosen.here is not None:
        run_here(chosen.here, chosen.bed, chosen.out, own)
        return 0
    extra = ["--repeats", str(chosen.repeats)] if chosen.repeats else []
    extra += ["--prompts", ",".join(map(str, chosen.prompts))] if chosen.prompts else []
    return run_all(chosen.only, chosen.bed, chosen.out.resolve(), extra)


if __name__ == "__main__":
    sys.exit(main())
