"""Plans: the search for them, the preflight before a launch, and the gates after a phase."""
