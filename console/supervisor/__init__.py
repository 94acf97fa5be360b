"""The detached process that owns torchrun: one per launch, without a terminal."""
