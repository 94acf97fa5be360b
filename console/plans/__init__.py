"""Plans: finding them, the preflight before a launch, and the gates after it."""
