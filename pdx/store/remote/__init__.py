"""Chunks in a store that several nodes share."""
