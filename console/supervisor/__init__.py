"""The detached supervisor of a launch: an owner process and its working process.

A launch has one supervisor, which has no terminal; its owner process owns torchrun.
"""
