"""The detached supervisor of a launch: an owner process and its working process.

Each launch has one supervisor, without a terminal. The owner starts torchrun and the working
process.
"""
