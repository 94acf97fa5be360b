"""The run contract, and code that trainers and console share, such as flags, values and errors.

Two modules import more than this package and the standard library: `yamlfile` imports pyyaml, and
`flags` imports `trainers.schema`. A Python program that torchrun starts can join a run through
`member`. See docs/extend.md.
"""

VERSION = 1
