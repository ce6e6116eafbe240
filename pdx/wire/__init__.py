"""Every message and its bounds."""
