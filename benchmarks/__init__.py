"""Measured claims: one script a claim, results in `results/` with command, machine and commit."""
