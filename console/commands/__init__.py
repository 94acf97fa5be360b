"""The subcommands of `nsa-console`: they print results and return exit codes."""
