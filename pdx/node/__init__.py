"""The daemon that owns a host's chunk memory."""
