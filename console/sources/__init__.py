"""The sources of records: files of a run directory, NVML, processes. Each returns plain data."""
