"""Plans: finding a plan, the preflight before a launch, and the gates after a phase."""
