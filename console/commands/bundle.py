"""`nsa-console bundle`: writes one archive of a run for a bug report."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from console import bundle as archive
from console import status_text
from console.commands import diagnose
from console.commands.output import show
from console.sources import launches
from console.sources.run import RunSource
from console.sources.sanitize import clean
from console.supervisor.diagnosis import Diagnoser
from trainers.contract import jsonl
from trainers.contract.errors import ContractError


def bundle(options: argparse.Namespace) -> int:
    """Writes the archive; prints its path, its size and the files that were left out."""
    path = launches.find(options.run, options.root)
    source = RunSource(path)
    state = source.poll()
    name = re.sub(r"[^\w.-]+", "-", state.id or path.name, flags=re.ASCII).strip("-.")[:100]
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    output = options.output or Path(f"bundle-{name}-{stamp}{archive.ENDING}")
    archive.check(output)
    made = {"status.json": jsonl.encode(status_text.as_json(state, source.is_launch))}
    made |= _diagnosis(path, options.root)
    manifest = archive.write(path, source.run_path, output, made)
    files, size = manifest["files"], output.stat().st_size
    removed, cut = (sum(each[key] for each in files) for key in ("removed", "truncated"))
    left = len(manifest["left_out"])
    record = {"path": str(output), "size_bytes": size, "files": len(files), "truncated": cut,
              "removed": removed, "left_out": left}  # fmt: skip
    show(options.json, record, [
        f"{output}: {status_text.size(size)}, {status_text.counted(len(files), 'file')} "
        f"({cut} truncated, {left} left out)",
        f"{status_text.counted(removed, 'value')} removed as secret; kept: {archive.KEPT}",
        "read the bundle before you publish it",
    ])  # fmt: skip
    return 0


def _diagnosis(path: Path, root: Path) -> dict[str, bytes]:
    """Returns the output of `diagnose` as text and as JSON, or the reason why it is missing."""
    try:
        found = Diagnoser(path).diagnose()
    except (ContractError, OSError) as error:
        return {"diagnosis.txt": f"not available: {error}\n".encode()}
    record = diagnose.as_json(found, root)
    text = "\n".join(map(clean, diagnose.lines(found, record)))
    return {"diagnosis.txt": f"{text}\n".encode(), "diagnosis.json": jsonl.encode(record)}
