"""The detached supervisor of a launch: an owner process and its working process.

The owner starts torchrun and the working process.
"""
