"""Codecs for chunks outside memory: lossless, or lossy if a request asks for that."""
