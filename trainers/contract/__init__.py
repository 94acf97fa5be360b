"""The run contract, and code that trainers and console share, such as flags, values and errors.

The modules import nothing outside of this package and the standard library, except `yamlfile`
(pyyaml) and `flags` (`trainers.schema`). A Python program that torchrun starts can join a run
through `member`. See docs/extend.md.
"""

VERSION = 1
