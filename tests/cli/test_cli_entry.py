"""The `pdx` program before its command runs."""

import signal
import subprocess
import sys

INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["pdx", "--version"]
"""


def run(code):
    signal_as_usual = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-P", "-c", f"{signal_as_usual}{INTERRUPTED}{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_ctrl_c_while_it_is_imported_prints_no_traceback():
    done = run("from pdx.cli.entry import run; run()")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_what_comes_before_is_imported_in_no_time():
    code = "import sys, pdx.cli.entry; sys.exit(', '.join({'zmq', 'msgspec', 'click'} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
