"""`pdx bench breakdown` with fake systems: python breakdown_program.py HANGS OPTIONS…

HANGS: the number of the request that `nixl` never answers.
"""

import sys

from fake_systems import FakeSystem

from pdx.bench.store import pages as memcpy
from pdx.bench.systems import names as systems
from pdx.cli.main import main

hangs = int(sys.argv.pop(1))
fakes = [
    FakeSystem("pdx", []),
    FakeSystem("nixl", [], hangs=lambda number: number == hangs),
    FakeSystem("plain", []),
]
systems.SYSTEMS.clear()
systems.SYSTEMS.update({fake.name: fake for fake in fakes})
memcpy.CALM_S = 0.0
main(["bench", "breakdown", *sys.argv[1:]])
