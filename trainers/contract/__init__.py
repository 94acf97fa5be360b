"""The run contract: the files that trainers write and the console reads.

The modules need only the standard library, except `yamlfile`, which needs pyyaml. Any torchrun
program can join a run through `member`, without NSA or torch. See docs/run-directory.md.
"""

VERSION = 1
