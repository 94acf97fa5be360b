"""One script per measured claim; `results/` has each result with command, machine and commit."""
