"""Plans before they run: which there are, whether they can start here, whether they passed."""
