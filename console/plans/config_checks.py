"""The checks of the plan: program, settings, resume, data, disk space, directory, GPU memory.

Most of these checks ignore the phase of a foreign program, because its settings are not known.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from console import access
from console.model import RESULTS, Result
from console.plan import Phase
from console.plans import gates, gpu_checks, launch_facts, sweep
from console.plans.case import Case, Found
from console.plans.gate_check import RESUME
from console.sources.rank_totals import LAST_STEPS
from console.status_text import size
from trainers import manifest, settings
from trainers.contract import data_access, rundir
from trainers.contract.errors import RefusedError

KEYS = {
    "parameters": ("model.",),
    "seq_len": ("data.seq_len",),
    "tokens_per_step": ("train.batch_size", "train.accumulate", "data.seq_len"),
}
"""Prefixes of the settings on which each expected fact depends."""
STEPS, SAVE_EVERY = "train.steps", "checkpoint.every"
GATE_VALUES: tuple[tuple[tuple[str, ...], str, tuple[Any, ...]], ...] = (
    (gates.OF_STATISTICS, "report.disable_aux_stats", (False,)),
    (gates.OF_STATISTICS, "model.attention", ("nsa",)),
    (("bytes_right",), "data.source", ("recall",)),
    (("comm_hook_active",), "ddp.compress", ("fp16", "bf16")),
    (("comm_hook_active",), "train.strategy", ("ddp",)),
    (gates.OF_GPU_MEMORY, "train.device", ("cuda", "auto")),
)
"""Names or figures of gates, and the values of a setting without which they cannot pass."""
RECORDS_BYTES = 1 << 30
"""Space for the records and logs of a launch."""
STATE_VALUES = 4
"""Values per parameter on a GPU: weight, gradient and two moments."""
NEARLY_FULL = 0.9


def program(case: Case) -> Found:
    """Checks that the script or the module of each phase can be found."""
    for phase in case.plan.phases:
        found = f"phase {phase.name!r}: there is no"
        if phase.script and not Path(phase.script).is_file():
            return "fail", f"{found} script {phase.script}; correct 'script' in the plan"
        if not phase.script and not _is_there(phase):
            return "fail", f"{found} module {phase.module}; install it, or correct 'module'"
    named = dict.fromkeys(phase.script or phase.module for phase in case.plan.phases)
    return "pass", ", ".join(named)


def _is_there(phase: Phase) -> bool:
    """Returns whether the module of a phase can be found, without an import of its packages.

    The ranks of a foreign program search the working directory first.
    """
    top, *parts = phase.module.split(".")
    folders = [] if phase.is_ours else [str(Path.cwd()), *sys.path]
    try:
        spec = PathFinder.find_spec(top, folders) or importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    for part in parts:
        folders = list(spec.submodule_search_locations or ()) if spec else []
        spec = PathFinder.find_spec(part, folders)
    return spec is not None


def config(case: Case, index: int) -> Found:
    """Checks the steps, gates and variants of a phase, and the facts that the plan expects.

    A failure that a setting of `--set` may have caused is only a warning. But too few steps in a
    sweep are always a failure.
    """
    phase, resolved = case.plan.phases[index], case.settings[index]
    why = gates.why_no_single(case.plan.phases, index)  # after --phase, --nproc or a resume
    if not resolved:
        if phase.sweep:
            why = "runs of a foreign program are not compared, unless they write tokens_per_step"
            why = f"{why} to {rundir.ENV}; remove 'variants'"
        return "unknown" if why else "pass", why or "a foreign program, not checked"
    steps, least = case.value(index, "train.steps"), sweep.LEAST_STEPS
    if phase.sweep and steps < least:
        text = f"train.steps is {steps}, and a run of a sweep needs at least {least} steps"
        return "fail", f"{text} to be compared; correct train.steps"
    if same := sweep.unchanged(case.plan, case.settings, phase.sweep):
        return "fail", f"{same}, although they should differ in it; correct the variants"
    problems: list[Found] = [*_wrong_gates(case, index), *_wrong_figures(case, index)]
    if why:
        problems.append(("unknown", why))
    if problems:
        return min(problems, key=lambda found: RESULTS.index(found[0]))
    found = _figures(case, index)
    expected = any(value for name, value in asdict(phase.expects).items() if name in KEYS)
    return "pass", (
        f"{len(resolved)} settings are valid: {found.parameters:,} parameters, sequences of "
        f"{found.seq_len:,}, {found.tokens_per_step:,} tokens per step, checkpoints of "
        f"{size(found.checkpoint_bytes)}{', as the plan expects' if expected else ''}"
    )


def _wrong_gates(case: Case, index: int) -> Iterator[Found]:
    """Yields one result if gates without an override cannot pass with the settings of a phase.

    An operator can save further checkpoints, so too few scheduled ones are only a warning.
    """
    phase, needs = case.plan.phases[index], dict[str, list[str]]()
    ranks = {"value": phase.nproc, "origin": "plan or --nproc"}
    resolved = {**case.settings[index], "nproc": ranks}
    for name, bound in phase.gates.items():
        if not gates.demand(bound).override:
            for key, needed in _needs(case, index, name, gates.demand(bound)):
                needs.setdefault(key, []).append(f"{name} needs {needed}")
    if needs:
        results: set[Result] = {
            "unknown" if key == SAVE_EVERY else _failure(resolved, key) for key in needs
        }
        texts = (f"{key} is {str(resolved[key]['value']).lower()} ({resolved[key]['origin']}), and "
                 + ", ".join(found) for key, found in needs.items())  # fmt: skip
        text = f"{'; '.join(texts)}; correct {' and '.join(needs)}, or remove the gates"
        yield min(results, key=RESULTS.index), text


def _needs(case: Case, index: int, name: str, wanted: gates.Demand) -> Iterator[tuple[str, str]]:
    """Yields the key and the needed value of each setting with which a gate cannot pass.

    The number of ranks has the key `nproc`.
    """
    names, value = {name, gates.RULES[name].figure}, partial(case.value, index)
    steps, every = value(STEPS), value(SAVE_EVERY)
    least = [*wanted.at, wanted.bound if name == "steps_done" else 0]
    least += [LAST_STEPS] if names & {*gates.OF_LAST_STEPS} else []
    if steps < max(least):
        yield STEPS, f"{max(least):,} steps"
    for of, key, accepted in GATE_VALUES:
        if names & {*of} and value(key) not in accepted:
            yield key, " or ".join(map(str, accepted)).lower()
    if name == "comm_hook_active" and case.plan.phases[index].nproc == 1:
        yield "nproc", "2 or more ranks"
    at_end = value("checkpoint.at_end") and not (every and steps % every == 0)
    if name in gates.OF_CHECKPOINTS and (steps // every if every else 0) + at_end < wanted.bound:
        yield SAVE_EVERY, f"{wanted.bound:,} checkpoints"


def _wrong_figures(case: Case, index: int) -> Iterator[Found]:
    """Yields one result if figures differ from those that a phase expects."""
    phase, found = case.plan.phases[index], _figures(case, index)
    expected = {name: fact for name, fact in asdict(phase.expects).items() if fact and name in KEYS}
    wrong = {name: fact for name, fact in expected.items() if getattr(found, name) != fact}
    if wrong:
        said = "; ".join(
            f"{name} is {getattr(found, name):,}, and the plan expects {fact:,}"
            for name, fact in wrong.items()
        )
        used = phase.config or "no config, so it trains the built-in toy"
        results: set[Result] = {_failure(case.settings[index], *KEYS[name]) for name in wrong}
        text = f"{said}; the phase uses {used}; correct --set, or config, set, nproc or expects"
        yield min(results, key=RESULTS.index), f"{text} of the phase"


def _failure(resolved: Mapping[str, Any], *prefixes: str) -> Result:
    """Returns "unknown" if `--set` changed a setting with one of the prefixes, or else "fail"."""
    by_hand = (key for key, entry in resolved.items() if entry["origin"] == settings.COMMAND_LINE)
    return "unknown" if any(key.startswith(prefixes) for key in by_hand) else "fail"


def checkpoint_bytes(case: Case) -> int:
    """Returns the size of the largest checkpoint of the plan in bytes, or 0 if none is known."""
    return max(_figures(case, i).checkpoint_bytes if s else 0 for i, s in enumerate(case.settings))


def _figures(case: Case, index: int) -> launch_facts.Figures:
    return launch_facts.figures(case.settings[index], case.plan.phases[index].nproc)


def disk(case: Case) -> Found:
    """Compares the free space with the space for checkpoints (`_kept_bytes`) and records."""
    checkpoints = sum(_kept_bytes(case, i) for i, held in enumerate(case.settings) if held)
    needed, folder = checkpoints + RECORDS_BYTES, nearest_folder(case.directory)
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError:
        total = free = 0
    if not total:
        text = f"the file system of {folder} does not report its space"
        return "unknown", f"{text}; the launch needs {size(needed)}"
    if free < needed:
        return "fail", (
            f"{folder} has {size(free)} free, and the launch needs {size(needed)} "
            f"({size(checkpoints)} for checkpoints); free space, or pass --root or --run-dir"
        )
    return "pass", f"{size(free)} free at {folder}, {size(needed)} are needed"


def _kept_bytes(case: Case, index: int) -> int:
    """Returns the most bytes that a phase's further checkpoints use; one may be unfinished."""
    every, last, forever, at_end = (
        case.value(index, f"checkpoint.{key}")
        for key in ("every", "keep_last", "keep_every", "at_end")
    )
    try:
        path = _resumes_from(case, index)
        first = manifest.read(path).step if path else 0
    except manifest.CheckpointError:  # the row `resume` fails
        first = 0
    steps = case.value(index, "train.steps")

    def due(interval: int) -> int:
        return max(0, steps // interval - first // interval) if interval else 0

    kept = min(due(every) + at_end, last + 1 + due(forever))
    return kept * _figures(case, index).checkpoint_bytes


def directory(case: Case) -> Found:
    """Checks that the launch can create its directory, and that `check_parents` accepts it."""
    try:
        access.check_parents(case.directory)
    except RefusedError as error:
        return "fail", str(error)
    folder = nearest_folder(case.directory)
    path = case.directory.absolute()
    if path != folder and os.path.lexists(file := folder / path.relative_to(folder).parts[0]):
        return "fail", f"{file} is not a directory; pass another directory with --root or --run-dir"
    if not os.access(folder, os.W_OK | os.X_OK):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        why = "is on a read-only file system" if read_only else "is not writable"
        return "fail", f"{folder} {why}; pass another directory with --root or --run-dir"
    return "pass", str(case.directory)


def resume(case: Case) -> Found:
    """Checks that a phase that resumes from a path outside this launch finds a checkpoint there.

    The ranks verify the files of the checkpoint. The check does not, because this would take long.
    """
    found = []
    for index, phase in enumerate(case.plan.phases):
        try:
            path = _resumes_from(case, index)
        except manifest.CheckpointError as error:
            return "fail", f"{phase.name} cannot resume: {error}; correct {RESUME}"
        if path is not None:
            found.append(f"{phase.name} resumes from {path} if it is intact")
    return "pass", ", ".join(found) or "no phase resumes from another run"


def _resumes_from(case: Case, index: int) -> Path | None:
    """Returns the checkpoint outside this launch from which a phase resumes, or None.

    Raises CheckpointError if there is none.
    """
    where = case.value(index, RESUME) if case.settings[index] else ""
    is_inside = Path(where).absolute().is_relative_to(case.directory.absolute())
    if where in ("", settings.AUTO) or is_inside:  # an earlier phase may save the checkpoint
        return None
    return manifest.choose(Path(where), case.value(index, "checkpoint.from_step"), manifest.read)[0]


def nearest_folder(path: Path) -> Path:
    """Returns the deepest existing folder of a path."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def gpu_memory(case: Case) -> Found:
    """Compares the memory of the ranks' GPUs with the least memory that a rank needs."""
    cards = () if isinstance(case.survey, str) else case.survey.cards
    if case.plan.gpus == 0 or not any(case.settings):
        return "pass", "a foreign program, not checked" if case.plan.gpus else "no GPU is needed"
    uuids, seen = [card.gpu.uuid for card in cards], set[int | None]()
    for index in range(len(case.plan.phases)):
        seen |= {*gpu_checks.visible(gpu_checks.chosen(case, index), uuids)[: case.plan.gpus]}
    sizes = [card.gpu.mem_total_mib for card in cards if card.gpu.index in seen]
    if not sizes or not all(sizes):
        return "unknown", "the memory of the GPUs is not available"
    needed, name = max(
        (_least_bytes(case, i), case.plan.phases[i].name) for i, s in enumerate(case.settings) if s
    )
    has = int(min(filter(None, sizes)) * (1 << 20))
    text = f"the phase {name!r} needs at least {size(needed)} of {size(has)} per GPU"
    if needed > has:
        advice = "lower train.batch_size or data.seq_len, or set train.recompute=all"
        return "fail", f"{text}; {advice}"
    return ("unknown" if needed > NEARLY_FULL * has else "pass"), text


def _least_bytes(case: Case, index: int) -> int:
    """Estimates a rank's least memory: weights, gradients, moments, activations and logits.

    The memory that the attention needs depends on its route and is not included. If some layers are
    recomputed, all count as recomputed.
    """
    batch, sequence, layers, dim, hidden, vocabulary, precision, recompute, strategy = (
        case.value(index, key)
        for key in ("train.batch_size", "data.seq_len", "model.n_layers", "model.dim",
                    "model.mlp_hidden", "model.vocab_size", "train.precision", "train.recompute",
                    "train.strategy")
    )  # fmt: skip
    nproc = case.plan.phases[index].nproc
    shards = nproc // case.value(index, "fsdp.replicas") if strategy == "fsdp" else 1
    if strategy == "ddp" and nproc > 1 and case.value(index, "ddp.disable_gc"):
        recompute = "none"
    weight, value = {"fp64": (8, 8), "bf16": (4, 2), "fp16": (4, 2)}.get(precision, (4, 4))
    state = STATE_VALUES * weight * _figures(case, index).parameters // max(1, shards)
    of_layer = 8 * dim + 3 * hidden if recompute == "none" else dim
    return state + batch * sequence * (layers * of_layer * value + 2 * vocabulary * weight)


def data(case: Case) -> Found:
    """Checks that the data and the tokenizer of each phase are available."""
    used = {
        tuple(case.value(i, f"data.{key}") for key in ("source", "path", "pattern", "tokenizer")): i
        for i, held in reversed([*enumerate(case.settings)]) if held
    }  # fmt: skip
    for (source, path, pattern, tokenizer), index in used.items():
        if why := _data_problem(source, path, pattern) or _tokenizer_problem(tokenizer):
            return "fail", f"phase {case.plan.phases[index].name!r}: {why}"
    return "pass", ", ".join(sorted({source for source, *_ in used})) or "a foreign program"


def _data_problem(source: str, path: str, pattern: str) -> str:
    if source == "fineweb_edu" and not path:
        return data_access.hub_problem()
    if source == "fineweb_edu" and not (Path(path) / "README.md").is_file():
        mirrored = data_access.DATASET
        return f"{path} has no README.md: it is not a mirror of {mirrored}; correct data.path"
    if source in ("text", "jsonl", "parquet") and path:
        root = Path(path)
        if not any(data_access.is_read(each, root, source) for each in root.glob(pattern)):
            why = f"{path} has no {source} file {pattern}; correct data.path or data.pattern"
            return "; ".join(filter(None, (why, data_access.unread_folders(root, pattern))))
    return ""


def _tokenizer_problem(name: str) -> str:
    if name != "gpt2":
        return ""
    if importlib.util.find_spec("tiktoken") is None:
        return "gpt2 needs tiktoken; pip install 'nsa-console[gpt2]', or use data.tokenizer=byte"
    why = data_access.gpt2_problem()
    return f"{why}; fetch them on a machine with a network" if why else ""
