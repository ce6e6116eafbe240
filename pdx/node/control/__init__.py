"""Controllers' verbs at a node: look up, move, drop, pin and recode chunks."""
