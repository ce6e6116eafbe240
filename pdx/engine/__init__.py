"""The engine side: saving and loading chunks, for any engine."""
