"""Not torch: holds the small torchrun only."""
