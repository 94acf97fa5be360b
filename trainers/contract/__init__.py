"""The run contract, and code that trainers and console share: flags, values, errors.

The modules need only the standard library, except `yamlfile` (pyyaml) and `flags` (`nsa`). A
Python program that torchrun starts can join a run through `member`, without NSA or torch. See
docs/extend.md.
"""

VERSION = 1
