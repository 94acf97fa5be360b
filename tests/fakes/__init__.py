"""Stand-ins for hardware, driven by data."""
