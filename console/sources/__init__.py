"""Reads run directories, processes and GPUs; the module `process` also sends signals."""
