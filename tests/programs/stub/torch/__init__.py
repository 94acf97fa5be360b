"""A package in the place of torch, which contains only the small torchrun."""
