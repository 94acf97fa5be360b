"""The commands `diagnose` (verdict and evidence) and `bundle` (an archive for a bug report)."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from console import bundle as archive
from console import status_text
from console.commands.output import show
from console.commands.query import resume_lines
from console.diagnose.rank_evidence import limit_s
from console.sources import launches, liveness, verdicts
from console.sources.run import RunSource
from console.sources.sanitize import clean
from console.stop_cost import completed_of, stop_cost
from console.supervisor.offline import Diagnosis, diagnosis
from trainers.contract import jsonl
from trainers.contract.errors import ContractError


def diagnose(options: argparse.Namespace) -> int:
    """Prints the verdict on a run; returns 1 if the run is stalled, or if that is unknown.

    For a run that has ended, returns the exit code of `status`.
    """
    found = diagnosis(launches.find(options.run, options.root))
    record = as_json(found, options.root)
    show(options.json, record, map(clean, lines(found, record, options.root)))
    return found.exit_code


def as_json(found: Diagnosis, root: Path) -> dict[str, Any]:
    """Returns a diagnosis as JSON data; its keys are documented and stable."""
    state, verdict = found.state, found.verdict
    seen = verdicts.seen_before(root, found.run, verdict) if verdict and found.run else None
    phase = verdict.phase if verdict else ""
    done = completed_of(state)
    cost = stop_cost(done, state.saved_step, bool(state.decided), phase)
    missing = [*(verdict.missing if verdict else ()), *found.missing]
    ranks = [
        {"rank": each.rank, "pid": each.pid or None, "state": each.state, "step": each.step,
         "phase": each.phase, "unchanged_s": round(each.unchanged_s, 1) if each.phase else None,
         "limit_s": limit_s(each, found.watch)}
        for each in found.ranks
    ]  # fmt: skip
    return {
        "id": state.id, "outlook": found.outlook, "state": state.state, "why": found.why,
        "step": state.step, "attempt": state.attempt, "source": found.source if verdict else "",
        "age_s": verdict and liveness.age(verdict.ts),
        "verdict": verdict and asdict(verdict), "missing": missing,
        "cost": cost if verdict and verdict.phase != "exit" and found.outlook != "ended" else "",
        "seen_before": seen and {"run": seen.run, "ts": seen.verdict.ts,
                                 "cause": seen.verdict.cause, "place": seen.verdict.place},
        "ranks": ranks,
        "exit_code": found.exit_code,
    }  # fmt: skip


def lines(found: Diagnosis, record: dict[str, Any], root: Path) -> Iterator[str]:
    """Yields a diagnosis as text; `root` has the launches that may continue this launch."""
    state, verdict = found.state, found.verdict
    yield f"{state.id}  {found.outlook.upper()}  {status_text.progress(state)}"
    if found.why:
        yield f"  {found.why}"
    if verdict:
        aged = f"{found.source}, {status_text.age(record['age_s'])} ago"
        if found.outlook == "ended" and verdict.end:
            aged += f"; ended: {verdict.end}"
        yield f"  verdict ({verdict.sure}; {aged}): {verdict.sentence}"
        yield from (f"    {mark} {line}" for mark, line in verdict.signs())
    yield from (f"    ? {line}" for line in found.missing)
    if verdict and verdict.action:
        yield f"  next: {verdict.action}"
    if record["cost"] and record["cost"] not in record["verdict"]["action"]:
        yield f"  cost: {record['cost']}"
    if found.outlook == "ended":
        yield from (f"  {line}" for line in resume_lines(state, root))
    if seen := record["seen_before"]:
        when = status_text.clock(seen["ts"], "%Y-%m-%d %H:%M")
        yield f"  seen before: {seen['run']} at {when}, {seen['cause']} at {seen['place']}"
    if not verdict:
        for each in record["ranks"]:
            where = "no pulse"
            if each["phase"]:
                where = f"step {each['step']} {each['phase']} for {each['unchanged_s']:.0f} s"
            yield (
                f"  rank {each['rank']} pid {each['pid'] or '?'} {each['state']}  {where}, "
                f"stall limit {each['limit_s']:.0f} s"
            )


def bundle(options: argparse.Namespace) -> int:
    """Writes the archive; prints its path and size, and the numbers of files and secrets."""
    path = launches.find(options.run, options.root)
    top = launches.launch_of(path)  # no link in a launch is followed
    path = path.resolve() if top is None or top == path else top.resolve() / path.name
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
        found = diagnosis(path)
    except (ContractError, OSError) as error:
        return {"diagnosis.txt": f"not available: {error}\n".encode()}
    record = as_json(found, root)
    text = "\n".join(map(clean, lines(found, record, root)))
    return {"diagnosis.txt": f"{text}\n".encode(), "diagnosis.json": jsonl.encode(record)}
