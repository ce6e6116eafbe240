"""What every engine needs to save and to load chunks."""
