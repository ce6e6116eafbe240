"""What controllers ask of a node: where chunks are, and to move, drop, pin and recode them."""
