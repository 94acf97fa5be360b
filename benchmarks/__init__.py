"""Scripts that measure; each file in `results/` has its command, machine and commit."""
