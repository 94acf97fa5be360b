"""Most alerts of a former working process stay open until the new one measures good values.

`non_finite` and `dead_parameters` stay open even then.
"""

from __future__ import annotations

import pytest

from console.diagnose.rank_evidence import RankEvidence
from console.diagnose.readings import Readings
from console.diagnose.watchdog import Watchdog
from console.model import Gpu
from console.plan import Watch
from console.sources.pace import progress_of

GPU = Gpu(0, "A100", "ok", mem_used_mib=100.0, mem_total_mib=1000.0, ecc_uncorrected=3)
WELL = {"loss": 2.12345, "grad_norm": 1.12345, "gate_entropy_mean": 0.8, "toks_per_s": 500.0,
        "batch_crc32": "1", "dt_fetch_s": 0.1, "steps_dt_s": [1.0]}  # fmt: skip
SICK = {"grad_norm": 0.0, "gate_entropy_mean": 1.0986, "gate_max_gate": 0.95, "dt_fetch_s": 0.9}


class Run:
    """Updates a watchdog with these raised rules once a second."""

    def __init__(self, *raised: str):
        self.dog, self.second = Watchdog(Watch()), 0
        self.dog.restore(raised)

    def poll(self, *records: dict, gpu: Gpu = GPU, seconds: int = 1, **more) -> list[str]:
        """Reads one record a second, or none for `seconds`; returns the rules that are cleared."""
        cleared = []
        for each in records or [None] * seconds:
            self.second += 1
            step = 5000 + self.second
            fresh = [progress_of({"rank": 0, "step": step} | each)] if each is not None else []
            ranks = (RankEvidence(0, 100, "S", step, "forward", 0.1, nonfinite_steps=0),)
            progress = {0: progress_of({"rank": 0, "step": step})}
            now = Readings(mono=float(self.second), ts=1e9 + self.second, gpus=(gpu,), ranks=ranks,
                           fresh=fresh, progress=progress | {p.rank: p for p in fresh},
                           **more)  # fmt: skip
            cleared += [c.rule.name for c in self.dog.update(now) if c.kind == "clear"]
        return cleared


OWN_DATA = ("dead_parameters", "non_finite", "zero_gradient", "gate_collapse",
            "gate_never_learned", "constant_figure", "throughput_drop", "loader_slow",
            "same_batch", "memory_growth")  # fmt: skip


@pytest.mark.parametrize("name", OWN_DATA)
def test_nothing_is_cleared_before_the_first_record(name):
    run = Run(name)
    assert run.poll(seconds=300) == []
    assert run.dog.raised() == (name,)


@pytest.mark.parametrize(
    "name", ["zero_gradient", "gate_collapse", "gate_never_learned", "loader_slow"]
)
def test_the_alert_of_a_figure_is_cleared_by_good_records_only(name):
    run = Run(name)
    assert run.poll(*[WELL | SICK] * 10) == []
    assert name in run.poll(*[WELL] * 3)


def test_one_record_does_not_show_that_a_figure_changes():
    run = Run("constant_figure")
    assert run.poll(*[WELL] * 5) == []
    assert run.poll(WELL | {"loss": 2.2345678, "grad_norm": 1.2345678}) == ["constant_figure"]


@pytest.mark.parametrize("name", ["dead_parameters", "non_finite"])
def test_an_alert_on_what_only_the_former_process_saw_stays(name):
    run = Run(name)
    assert run.poll(*[WELL] * 900) == []


def test_ranks_that_have_not_recorded_the_same_step_yet_do_not_clear_the_same_batch():
    dog = Watchdog(Watch())
    dog.restore(["same_batch"])
    for second, (rank, step) in enumerate([(1, 20), (0, 40), (1, 40), (0, 60), (1, 60)]):
        fresh = progress_of({"rank": rank, "step": step, "batch_crc32": str(step)})
        changes = dog.update(
            Readings(mono=float(second), ts=1e9, fresh=[fresh], progress={0: fresh})
        )
        assert [c.rule.name for c in changes if c.rule.name == "same_batch"] == []
