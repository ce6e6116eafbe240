"""Addresses, keys and sockets: which processes may connect, and where."""
