"""The parts of the screen, one per file."""
