"""Plans: finding a plan, its preflight, the gates after a phase, sweeps and reports."""
