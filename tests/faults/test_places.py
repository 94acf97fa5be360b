"""Another run's directory, no shared memory, a sparse file, and no free descriptor."""

from __future__ import annotations

import os
import resource
import shutil
import time

import pytest

from tests.faults.scene import all_run, order, plant_kill
from tests.launches import STUB
from trainers.contract import rundir

WITHOUT_MEMORY = """
import sys
if "console.supervisor" in sys.orig_argv:
    from pathlib import Path
    from trainers.contract import rundir
    rundir.SHARED_MEMORY = Path("/proc/no-shared-memory")
"""


@pytest.mark.decision("own-directory", "lie")
@pytest.mark.fault("g", "run directory replaced by a copy of another run's")
def test_another_runs_directory_in_the_place_of_ours_is_neither_obeyed_nor_written(scene, launch):
    started = launch()
    pids, run = started.pids(), started.run()
    started.wait_state("running")
    away = run.rename(started.path / "away")
    planted = plant_kill(run)
    time.sleep(6)
    assert all_run(pids)
    assert os.listdir(run) == [rundir.REQUESTS]
    assert os.listdir(run / rundir.REQUESTS) == [planted.name]
    shutil.rmtree(run)
    away.rename(run)
    scene.goes_on(started, pids)


@pytest.mark.decision("act-on-stall", "absent")
@pytest.mark.fault("f", "none from the begin")
def test_without_shared_memory_a_stall_is_said_and_nothing_is_done(scene, launch, orders, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MEMORY)
    started = launch(shell={"PYTHONPATH": f"{tmp_path}:{STUB['PYTHONPATH']}"})
    pids = started.pids()
    order(orders, 1, "sleep 12")
    told = started.wait(lambda: started.alerts("stall-withheld"))[0]["text"]
    assert "there is no shared memory: pulses and records are in one directory" in told
    scene.goes_on(started, pids)


@pytest.mark.fault("i", "a heartbeat with a hole of 1 TB")
def test_a_hole_in_a_heartbeat_keeps_no_run_from_its_end(scene, launch):
    started = launch(steps=150)
    os.truncate(rundir.heartbeat(started.run(), 1), 1 << 40)
    ended = started.wait_end()
    assert ended["phases"][0]["state"] == "completed", ended["why"]
    scene.note("the run ends; the hole is skipped")


@pytest.mark.fault("k", "no descriptor to spare")
def test_a_supervisor_without_a_descriptor_to_spare_harms_no_rank(scene, launch):
    started = launch()
    pids, child = started.pids(), started.child()
    resource.prlimit(child, resource.RLIMIT_NOFILE, (12, 12))
    time.sleep(2)
    assert started.child() == child
    resource.prlimit(child, resource.RLIMIT_NOFILE, (3, 3))
    started.wait(lambda: started.child() != child)
    scene.goes_on(started, pids)
