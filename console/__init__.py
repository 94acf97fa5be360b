"""The console: launches and supervises torchrun trainings, and shows their state."""
