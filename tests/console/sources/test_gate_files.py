"""The files that gates need besides the records may be damaged or hostile."""

from __future__ import annotations

import json

import pytest

from console.sources import gate_files
from console.sources.record_files import RecordFiles
from console.supervisor.run_files import Files
from trainers.contract import rundir


def test_an_absurd_number_of_attempts_is_a_doubt(tmp_path):
    found = gate_files.read(tmp_path, 1 << 60, 1)
    assert found.log_doubt == "there are more than 1000 attempts"


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000])
def test_a_name_that_no_file_can_have_is_a_missing_file(tmp_path, name):
    folder = tmp_path / rundir.CHECKPOINTS / "step_00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"files": {name: [1, "x"]}}))
    (folder.parent / rundir.LATEST).write_text(folder.name)
    log = rundir.logs(tmp_path, 1) / rundir.TORCHRUN_LOG
    log.parent.mkdir(parents=True)
    log.write_text("Received 15 death signal\n")
    found = Files(tmp_path, 1, 1, RecordFiles(tmp_path)).read_final()
    assert (found.torchrun_signal, found.checkpoint) == ("SIGTERM", 1)
    assert found.files is not None
    assert "is missing" in found.files.checkpoint_doubt
