"""The parts of the screen, and the widgets that they share."""
