"""The options, the rank and the fault of a drilled program."""

import argparse
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--phases", action="store_true")
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()
folder = options.folder
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
written = folder / "fault"
named = os.environ.get("FAULT") or (written.read_text() if written.exists() else "-@0:all")
fault, _, place = named.partition("@")
mechanism, _, fault_phase = fault.rpartition("-")
fault_step, _, fault_rank = place.partition(":")


def here(name: str, phase: str, step: int) -> bool:
    """Returns whether a rank has this fault in this phase of this step."""
    return int(fault_step) == step and (mechanism, fault_phase) == (name, phase)


def due(name: str, phase: str, step: int) -> bool:
    """Returns whether this rank has this fault here; if so, writes the time to `reached.RANK`."""
    if not (here(name, phase, step) and fault_rank in ("all", str(rank))):
        return False
    scratch = folder / f"scratch.{rank}"
    scratch.write_text(f"{time.time()}")
    scratch.rename(folder / f"reached.{rank}")
    return True
