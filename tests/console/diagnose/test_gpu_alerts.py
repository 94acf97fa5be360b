"""The watch rules on GPUs: which changes are reported, when, and with which text."""

from __future__ import annotations

import time
from dataclasses import replace

from console.diagnose.readings import Readings
from console.diagnose.watchdog import Watchdog
from console.model import Gpu
from console.plan import Watch

GPU = Gpu(0, "A100", "ok", mem_used_mib=100.0, mem_total_mib=1000.0, ecc_uncorrected=3)


def gpu_texts(*moments: tuple[Gpu, ...], began=0):
    """Updates a watchdog with one moment a second; returns second, kind and text of each change."""
    dog, found = Watchdog(Watch()), []
    for second, moment in enumerate(moments, began):
        changes = dog.update(Readings(mono=second, ts=1e9 + second, gpus=moment))
        found += [(second, c.kind, c.text) for c in changes]
    return found


def with_xids(index: int, *numbers: int, second: float) -> Gpu:
    return replace(
        GPU, index=index, xid=numbers[-1], xids=numbers, xid_count=len(numbers), xid_ts=1e9 + second
    )


def at(second: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(1e9 + second))


def test_each_xid_is_reported_with_its_gpu_and_clears_after_ten_minutes():
    well, other = replace(GPU, index=3), replace(GPU, index=4)
    first, again = with_xids(3, 79, second=5), with_xids(3, 79, 79, second=40)
    elsewhere = with_xids(4, 31, second=60)
    said = gpu_texts(
        *[(well, other)] * 5, *[(first, other)] * 35, *[(again, other)] * 20,
        *[(again, elsewhere)] * 700,
    )  # fmt: skip
    both = f"Xid 79 on GPU 3, 2 times, last {at(40)}; Xid 31 on GPU 4 at {at(60)}"
    assert said == [
        (5, "raise", f"Xid 79 on GPU 3 at {at(5)}"),
        (40, "clear", "replaced by the next alert"),
        (40, "raise", f"Xid 79 on GPU 3, 2 times, last {at(40)}"),
        (60, "clear", "replaced by the next alert"),
        (60, "raise", both),
        (660, "clear", "xid cleared"),
    ]


def test_many_xids_are_reported_a_few_times_with_their_number():
    moments = [(with_xids(0, *[31] * (1 + second), second=second),) for second in range(60)]
    said = [text for _, kind, text in gpu_texts((GPU,), *moments, began=-1) if kind == "raise"]
    assert len(said) == 6
    assert said[-1] == f"Xid 31 on GPU 0, 51 times, last {at(50)}"


def test_an_xid_that_ended_the_attempt_before_is_reported():
    """The Xid came after the last update of the former attempt."""
    assert gpu_texts((with_xids(3, 79, second=-4),)) == [
        (0, "raise", f"Xid 79 on GPU 3 at {at(-4)}")
    ]
    assert gpu_texts((with_xids(3, 79, second=-700),), (GPU,)) == []


def test_a_gpu_that_is_lost_again_or_another_one_is_reported_again():
    zero, one = GPU, replace(GPU, index=1)
    lost, lost_one = replace(zero, state="lost", why="lost"), replace(one, state="lost", why="lost")
    said = gpu_texts(
        *(*[(lost, one)] * 20, *[(lost, lost_one)] * 20) * 2,
        *[(zero, one)] * 5, *[(zero, lost_one)] * 5,
    )  # fmt: skip
    both = "GPU 0 is lost; GPU 1 is lost"
    assert [(second, text) for second, kind, text in said if kind == "raise"] == [
        (0, "GPU 0 is lost"), (20, both), (60, both), (85, "GPU 1 is lost"),
    ]  # fmt: skip


def test_a_gpu_without_values_clears_none_of_its_alerts_and_has_its_own():
    hot = replace(GPU, throttle="hardware thermal")
    silent = replace(GPU, state="error", why="NVML has not answered for 6 s", throttle="")
    other = replace(GPU, index=1)
    said = gpu_texts(*[(hot, other)] * 70, *[(silent, other)] * 30, *[(hot, other)] * 5)
    assert said == [
        (60, "raise", "GPU 0 is throttled (hardware thermal)"),
        (80, "raise", "NVML returns no values for GPU 0 (NVML has not answered for 6 s)"),
        (100, "clear", "gpu_silent cleared"),
    ]


def test_full_memory_stays_reported_while_its_gpu_does_not_answer():
    full, other = replace(GPU, mem_used_mib=999.0), replace(GPU, index=1)
    silent = replace(GPU, state="ok", mem_used_mib=None, why="no memory (Unknown Error)")
    said = gpu_texts(*[(full, other)] * 70, *[(silent, other)] * 30, *[(GPU, other)] * 5)
    assert said == [
        (60, "raise", "100% of the memory of GPU 0 is in use"),
        (100, "clear", "gpu_memory_ceiling cleared"),
    ]


def test_memory_errors_are_reported_again_and_clear_after_a_reset():
    worse = [replace(GPU, ecc_uncorrected=count) for count in (3, 4, 7)]
    reset = replace(GPU, ecc_uncorrected=0)
    said = gpu_texts(*[(gpu,) for gpu in worse for _ in range(20)], *[(reset,)] * 3)
    start = "uncorrected memory errors in this attempt:"
    assert [text for _, _, text in said] == [
        f"{start} 1 on GPU 0", "replaced by the next alert", f"{start} 4 on GPU 0",
        "ecc cleared",
    ]  # fmt: skip
