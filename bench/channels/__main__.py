"""`python -m pdx.bench.channels`: see `pdx.bench.channels.measure`."""

from pdx.bench.channels.measure import main

main()
