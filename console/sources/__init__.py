"""Reads run directories, processes and GPUs. Each module returns plain data."""
