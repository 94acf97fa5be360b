"""Finds and checks plans, evaluates gates, compares sweeps and writes reports."""
