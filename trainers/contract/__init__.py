"""The run contract: what trainers write, what the console reads, what both agree on.

Standard library only (`yamlfile` alone needs pyyaml), and nothing here knows NSA or torch, so any
torchrun program can join a run and any reader can follow one. See docs/run-directory.md.
"""

VERSION = 1
