"""Shipped test material: what third parties need to test their own parts of PDX. Imports nothing by itself."""
