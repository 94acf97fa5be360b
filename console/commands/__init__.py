"""The subcommands of `nsa-console`: what they print and what they return."""
