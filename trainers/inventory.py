"""Writes reports of a run: dtypes, libraries, optimizer size; on GPUs also driver and memory.

The recorder's thread writes all files, so a slow or full disk does not stall a step. With FSDP, the
names of the dtype, optimizer and memory files contain `fsdp`, and each rank reports the optimizer
size of its own shards.
"""

from __future__ import annotations

import platform
import subprocess
import threading
from collections import Counter
from importlib.metadata import distributions, version
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nsa.backends import Route, in_words
from nsa.functional import routes_of
from trainers.contract import rundir
from trainers.contract.member import Member
from trainers.parallel import Single
from trainers.precision import MFU_FORMULA, compute_dtype
from trainers.schema import Settings
from trainers.sequences import Source

NVIDIA_SMI, NVIDIA_SMI_S, CLOSE_S = ("nvidia-smi", "-q", "-x"), 60.0, 10.0
MIB = 1 << 20


class Inventory:
    """Writes the files of one rank, for example reports of dtypes and memory.

    The memory of a GPU is dumped at the boot and after the first step of this process. If `every`
    is above 0, it is also dumped before and after every `every`-th step.
    """

    def __init__(
        self, member: Member, parallel: Single, model: nn.Module,
        optimizer: torch.optim.Optimizer, every: int,
    ):  # fmt: skip
        self._member, self._optimizer, self._every = member, optimizer, every
        self._on_cuda = parallel.device.type == "cuda"
        self._fsdp = "_fsdp" if parallel.name == "fsdp" else ""
        self._is_first = True
        # This is a separate thread, so that a hung driver blocks neither a step nor a record.
        self._environment = threading.Thread(target=self._write_environment, daemon=True)
        self._dump_memory("boot")
        if member.rank == 0:
            self._write(f"dtypes_report{self._fsdp}.txt", dtypes(model))
            self._environment.start()
            if not self._on_cuda:
                member.log("memory dumps (mem_*): not on CPU")

    def begin(self, step: int) -> None:
        """Writes the memory dump that is due before a step."""
        if self._every and step % self._every == 0:
            self._dump_memory(f"pre_step{step}")

    def end(self, step: int) -> None:
        """Writes the memory dumps due after a step, and the optimizer size after the first step.

        Without FSDP, only rank 0 writes the size.
        """
        if self._is_first:
            self._is_first = False
            self._dump_memory(f"step{step}")
            rank = self._member.rank
            if rank == 0 or self._fsdp:
                name = f"opt_state{self._fsdp}_mb{f'_rank{rank}' if rank else ''}.txt"
                self._write(name, f"{state_mib(self._optimizer):.2f}\n")
        if self._every and step % self._every == 0:
            self._dump_memory(f"post_step{step}")

    def close(self) -> None:
        """Waits at most `CLOSE_S` until the thread has queued its files."""
        if self._environment.ident is not None:
            self._environment.join(CLOSE_S)

    def _dump_memory(self, when: str) -> None:
        if not self._on_cuda:
            return
        stem = f"mem{self._fsdp}_{when}_rank{self._member.rank}"
        statistics, path = torch.cuda.memory_stats(), self._member.run / f"{stem}.json"
        self._write(f"{stem}.txt", torch.cuda.memory_summary())
        self._member.recorder.call(lambda: rundir.write_json(path, statistics), keep=False)

    def _write(self, name: str, text: str) -> None:
        path = self._member.run / name
        self._member.recorder.call(lambda: rundir.write_atomic(path, text), keep=False)

    def _write_environment(self) -> None:
        self._write("collect_env.txt", environment())
        if self._on_cuda:
            self._write("nvidia_smi.xml", nvidia_smi())


def dtypes(model: nn.Module) -> str:
    """Returns a text: the number of elements per dtype, then dtype and shape of each tensor."""
    rows = [("PARAM", name, each) for name, each in model.named_parameters()]
    rows += [("BUFFER", name, each) for name, each in model.named_buffers()]
    sizes: Counter[str] = Counter()
    for _, _, each in rows:
        sizes[str(each.dtype)] += each.numel()
    whole = max(sizes.total(), 1)
    lines = [f"{dtype}: {n} ({100 * n / whole:.2f}%)" for dtype, n in sizes.most_common()]
    lines += ["", *(f"{kind} {name} {x.dtype} {tuple(x.shape)}" for kind, name, x in rows)]
    return "\n".join(("# DTYPE SUMMARY (elements)", *lines, ""))


def state_mib(optimizer: torch.optim.Optimizer) -> float:
    """Returns the size of the optimizer's state on this rank in MiB."""
    values = (each for state in optimizer.state.values() for each in state.values())
    local = (x.to_local() if isinstance(x, DTensor) else x for x in values if torch.is_tensor(x))
    return sum(x.nbytes for x in local) / MIB


def environment() -> str:
    """Returns a text with versions, torch's build and all packages, without starting pip."""
    packages = {f"{each.name}=={each.version}" for each in distributions()}
    facts = {
        "python": platform.python_version(), "platform": platform.platform(),
        "torch": torch.__version__, "cuda of torch": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "git of torch": torch.version.git_version,
    }  # fmt: skip
    lines = [f"{name}: {value}" for name, value in facts.items()]
    return "\n".join((*lines, "", torch.__config__.show(), *sorted(packages), ""))


def nvidia_smi() -> str:
    """Returns the XML of nvidia-smi, or an XML comment with the reason why there is none.

    nvidia-smi gets no variable of the run, so that the supervisor does not wait for nvidia-smi.
    """
    try:
        done = subprocess.run(
            NVIDIA_SMI, stdin=subprocess.DEVNULL, capture_output=True, timeout=NVIDIA_SMI_S,
            check=True, env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/nvidia/bin"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"<!-- not available: {str(error).replace('--', '- -')} -->\n"
    return done.stdout.decode("utf-8", "replace")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def collect(
    parallel: Single, model: nn.Module, source: Source, settings: Settings
) -> dict[str, Any]:
    """Returns facts about this run that are not among its settings."""
    on_cuda, routes = parallel.device.type == "cuda", planned_routes(parallel.device, settings)
    separate = settings.data.documents == "separate"
    length = {"for": f"a document of {settings.data.seq_len:,} tokens"} if separate else {}
    return {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "datasets")},
        "cuda": torch.version.cuda,
        "device": {"type": parallel.device.type, "name": device_name(parallel.device)},
        "device_count": torch.cuda.device_count() if on_cuda else 0,
        "threads_per_rank": torch.get_num_threads(),
        "strategy": parallel.name,
        "backend": in_words(routes) | length,
        "comm_backend": parallel.backend,
        "comm_hook": parallel.comm_hook,
        "data": {"about": source.about, "fingerprint": source.fingerprint},
        "parameters_counted": sum(p.numel() for p in model.parameters()),
        "mfu_formula": MFU_FORMULA,
    }


def planned_routes(device: torch.device, settings: Settings) -> dict[str, Route]:
    """Returns the route of each attention branch for the shapes and the precision of a run.

    With data.documents=separate, these are the routes of one document of S tokens.
    """
    separate = settings.data.documents == "separate"
    return routes_of(
        settings.model, settings.data.seq_len, device, compute_dtype(settings.train.precision),
        settings.attention, batch=1 if separate else settings.train.batch_size,
    )  # fmt: skip


def memory(device: torch.device) -> dict[str, int]:
    """Returns the GPU memory of this rank in MiB, or {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "gpu_mem_alloc": torch.cuda.memory_allocated(device) >> 20,
        "gpu_mem_reserved": torch.cuda.memory_reserved(device) >> 20,
    }
