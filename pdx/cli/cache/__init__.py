"""`pdx cache`: what is kept, where, and how to change that."""
