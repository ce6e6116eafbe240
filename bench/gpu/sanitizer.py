"""Runs the kernel tests under NVIDIA's compute-sanitizer, memcheck and initcheck: `python -m pdx.bench.gpu.sanitizer`.

Without the sanitizer or a GPU, the command says so and succeeds: the sanitizer comes with the CUDA toolkit, which PDX
does not need.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from pdx.bench.harness.report import ROOT
from pdx.cuda.gpu import why_no_gpu

# No racecheck: it checks shared memory only, and the copy kernel has none. Failed CUDA calls are not findings, because
# torch and cuda-bindings ask for a context before there is one.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "initcheck": ()}
TESTS = ["tests/gpu/test_real_kernels.py", "-k", "test_whole_batches or test_slots_in_memory_of_the_driver"]
FOUND = 86  # exit status that stands for an error found by the sanitizer


def find() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")


def paths() -> str:
    """The PYTHONPATH with which child processes find `pdx` in a checkout, too."""
    return os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)


def main() -> int:
    if why := why_no_gpu():
        print(f"compute-sanitizer is not run: {why}")
        return 0
    program = find()
    if program is None:
        print("compute-sanitizer is not run: it is not installed (CUDA toolkit, or /usr/local/cuda/bin)")
        return 0
    # Each tensor is an allocation of its own, so that an access past its end is detected.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths()}
    for tool, settings in TOOLS.items():
        command = [
            program,
            "--tool",
            tool,
            *settings,
            "--error-exitcode",
            str(FOUND),
            "--target-processes",
            "application-only",
        ]
        command += [sys.executable, "-m", "pytest", *TESTS, "-q", "-p", "no:cacheprovider", "-o", "timeout=0"]
        print(f"compute-sanitizer {tool}", flush=True)
        if code := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            print(f"compute-sanitizer {tool}: {'errors were found' if code == FOUND else 'the tests failed'}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
