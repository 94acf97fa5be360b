"""The detached supervisor of a launch: an owner process and its working process.

A launch has one supervisor, without a terminal; its owner process owns torchrun.
"""
