"""The trainers: the programs that torchrun starts, and the run contract."""
