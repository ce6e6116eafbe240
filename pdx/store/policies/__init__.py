"""Eviction policies."""
