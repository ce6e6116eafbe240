"""The Python API, and one process's connection to its node."""
