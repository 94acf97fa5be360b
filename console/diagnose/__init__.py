"""The watch rules, and the verdict on a run that makes no progress; no module here reads a file."""
