"""Tests `rundir.names`: other users may have put links into the directories of a run."""

from __future__ import annotations

from trainers.contract import rundir


def test_names_are_sorted_and_no_directory_below_the_run_is_read_through_a_link(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    for name in ("rank1.log", "rank0.log"):
        for folder in (run / "logs" / "attempt1", outside / "attempt2"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    (run / "logs" / "attempt2").symlink_to(outside / "attempt2")
    (run / "other").symlink_to(outside)
    assert rundir.names(run / "logs" / "attempt1", run) == ["rank0.log", "rank1.log"]
    assert rundir.names(run / "logs" / "attempt2") == ["rank0.log", "rank1.log"]
    for folder in (run / "logs" / "attempt2", run / "other" / "attempt2", run / "none"):
        assert rundir.names(folder, run) is None
    assert rundir.names(run / "logs" / "attempt1" / "rank0.log") is None
