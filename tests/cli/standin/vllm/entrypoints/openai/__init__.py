"""Stands in for vLLM where `pdx up` is tested: a server that is healthy at once and has a child of its own."""
