"""A node among its peers."""
