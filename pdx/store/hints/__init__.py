"""What applications have said of chunks, as far as it outlasts their requests: leases, ends, and what leaves memory."""
