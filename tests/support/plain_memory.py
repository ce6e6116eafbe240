"""Memory of a test as nodes read it."""


class PlainMemory:
    """A buffer with the methods of an `Arena` that digests need."""

    def __init__(self, data):
        self.view = memoryview(data)
        self.nbytes = self.view.nbytes

    def read(self, offset, nbytes):
        return self.view[offset : offset + nbytes]
