"""Eight GPUs on the screen, of which one is lost."""

from __future__ import annotations

from console.sources.run import RunSource
from tests.fakes import nvml as fake
from tests.launches import CONSOLE, ROOT, STUB, phase
from tests.terminal import Terminal


def test_eight_gpu_rows_appear_and_a_lost_one_is_marked_lost(begin, tmp_path):
    """The supervisor samples through the real pynvml over a fake of NVML's C library."""
    fake.build(tmp_path)
    shell = {**STUB, "LD_LIBRARY_PATH": str(tmp_path)}
    started = begin(phase("one", "member.py", 100_000), nproc=8, shell=shell)
    started.wait(lambda: RunSource(started.path).poll().step)
    with Terminal([*CONSOLE, "watch", str(started.path)], ROOT) as terminal:
        figures = ("97% ", "322W", " 64 ", "60/80G")

        def with_figures(text: str) -> int:
            return sum(all(each in line for each in figures) for line in text.splitlines())

        terminal.wait(lambda text: with_figures(text) == 8 and "watt °C" in text)
        fake.write(tmp_path, gpu3={"state": "lost"})
        terminal.wait(lambda text: with_figures(text) == 7 and any(
            line.startswith("3 ") and "lost" in line.lower() for line in text.splitlines()
        ))  # fmt: skip
        terminal.leave()
