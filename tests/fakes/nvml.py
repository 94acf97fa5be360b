"""Builds the fake of NVML's C interface, and writes the answers of its driver and GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.fakes import compiled

SOURCE = Path(__file__).with_name("nvml.c")
GPU = {
    "util": 97, "power_mw": 321_500, "used": 61_000, "total": 81_920, "temp": 64, "mhz": 1410,
    "state": "ok", "delay_ms": 0, "throttle": 4, "ecc": 0, "mig": 0, "refused": "-",
    "name": "Fake A100-SXM4-80GB",
}  # fmt: skip
IDLE = {"util": 0, "used": 500}
HANGS_MS = 300_000


def build(folder: Path) -> Path:
    """Compiles libnvidia-ml.so.1 into `folder`, and writes gpus.txt with eight GPUs."""
    library = compiled(SOURCE, folder / "libnvidia-ml.so.1")
    write(folder)
    return library


def write(folder: Path, count: int = 8, **changed: dict[str, object]) -> None:
    """Replaces gpus.txt; `gpu3={"state": "lost"}` changes one GPU."""
    lines = []
    for index in range(count):
        gpu = {**GPU, **changed.get(f"gpu{index}", {})}
        words = (w if isinstance(w, bytes) else str(w).encode() for w in (index, *gpu.values()))
        lines.append(b" ".join(words))
    _replace(folder / "gpus.txt", b"\n".join(lines) + b"\n")


def driver(folder: Path, init: int = 0, delay_ms: int = 0, cuda: int = 13_000) -> None:
    """Sets the code and the delay of nvmlInit, and the newest CUDA version of the driver."""
    _replace(folder / "driver.txt", f"{init} {delay_ms} {cuda}\n".encode())


def processes(folder: Path, *pairs: tuple[int, int]) -> None:
    """Sets the processes that compute, as pairs of GPU and pid."""
    _replace(folder / "processes.txt", "".join(f"{gpu} {pid}\n" for gpu, pid in pairs).encode())


def xid(folder: Path, gpu: int, number: int, via: int | None = None) -> None:
    """Sends an Xid of a GPU to the event sets of the GPU `via`, by default of the same GPU."""
    with (folder / "events.txt").open("a") as stream:
        stream.write(f"{gpu} {gpu if via is None else via} {number}\n")


def kernel(root: Path, count: int) -> Path:
    """Lists GPUs below `root` the way the kernel's driver does; returns `root`."""
    for index in range(count):
        folder = root / f"proc/driver/nvidia/gpus/0000:{index:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t Fake\nDevice Minor: \t {index}\n")
    return root


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
