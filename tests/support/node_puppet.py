"""A client process on strings: reads one JSON list [verb, arguments…] per line, answers one JSON value per line."""

import json
import sys

import pdx


class Puppet:
    """One attached client and the chunks it holds, by name."""

    def __init__(self, address):
        self.node = pdx.connect(address, timeout_s=20.0)
        self.chunks = {}
        self.views = {}

    def reserve(self, name, nbytes, parts=1):
        self.chunks[name] = self.node.reserve(name, nbytes, parts=parts)
        self.views[name] = self.chunks[name].view
        return self.chunks[name].slot.offset

    def write(self, name, value):
        """Through the view taken when it was reserved, as an engine in the middle of a copy would."""
        self.views[name][:] = bytes([value]) * len(self.views[name])

    def fill(self, name, part):
        self.chunks[name].fill(part)

    def seal(self, name):
        self.chunks[name].seal()

    def put(self, name, nbytes, value):
        self.reserve(name, nbytes)
        self.write(name, value)
        self.seal(name)

    def get(self, name, lease_s=60.0):
        self.chunks[name] = self.node.get(name, lease_s=lease_s)
        self.views[name] = self.chunks[name].view
        return self.chunks[name].slot.offset

    def read(self, name):
        """The distinct byte values in it."""
        return sorted(set(bytes(self.views[name])))

    def check(self, name):
        self.chunks[name].check()

    def release(self, name):
        self.chunks[name].release()


def serve(puppet, told):
    """Until nobody says anything more. `told`: what is said of an error."""
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        try:
            result = getattr(puppet, verb)(*arguments)
        except pdx.PdxError as error:
            result = told(error)
        print(json.dumps(result), flush=True)  # noqa: T201
    puppet.node.close()


if __name__ == "__main__":
    serve(Puppet(sys.argv[1]), lambda error: type(error).__name__)
