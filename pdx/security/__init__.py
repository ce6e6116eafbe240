"""Who may connect, and at which addresses."""
