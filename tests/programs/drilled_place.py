"""Where a drilled program stands: its words, its rank, and the place of its one fault."""

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
    """Returns whether some rank has this fault at this place."""
    return int(fault_step) == step and (mechanism, fault_phase) == (name, phase)


def due(name: str, phase: str, step: int) -> bool:
    """Returns whether this rank has this fault here, and writes down when it begins."""
    if not (here(name, phase, step) and fault_rank in ("all", str(rank))):
        return False
    scratch = folder / f"scratch.{rank}"
    scratch.write_text(f"{time.time()}")
    scratch.rename(folder / f"reached.{rank}")
    return True
