"""A node's chunk store: chunks and their life, leases, slot pools, eviction, tiers and copies. No sockets here."""
