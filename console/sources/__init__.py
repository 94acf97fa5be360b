"""Where records come from: files of a run directory, NVML, processes. Each yields plain data."""
