"""Scripts that measure; `results/` has each result with its command, machine and commit."""
