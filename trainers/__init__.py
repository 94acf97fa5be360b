"""The trainers, the commands on their checkpoints and data, and the run contract."""
