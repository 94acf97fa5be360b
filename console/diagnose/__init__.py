"""The watch rules, and the verdict on a run that makes no progress; no file is read here."""
