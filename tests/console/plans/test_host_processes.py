"""The rows of the preflight about the other processes of the host."""

from __future__ import annotations

import fcntl

from console.plans import host_checks
from console.plans.case import Case
from tests.console.plans.test_preflight import bare
from trainers.contract import environ, rundir


def process(root, pid, parent, command, opens="", **variables):
    """Writes one process of a /proc that is made of files."""
    folder = root / f"proc/{pid}"
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (folder / "stat").write_text(f"{pid} (a ) b) S {parent} 0 0\n")
    (folder / "environ").write_text("".join(f"{k}={v}\0" for k, v in variables.items()))
    if opens:
        (folder / "fd/7").symlink_to(opens)


def test_a_leftover_trainer_on_a_gpu_is_refused_by_its_pid(tmp_path):
    process(tmp_path, 1, 0, "init")
    process(tmp_path, 10, 1, "python -P -m console.supervisor /launch")
    process(tmp_path, 11, 10, "python -m torch.distributed.run -m trainers.ddp")
    process(tmp_path, 12, 11, "python -u -m trainers.ddp", "/dev/nvidia0")
    process(tmp_path, 13, 1, "vim trainers/ddp.py")
    assert host_checks.leftovers(bare(tmp_path, gpus=2))[0] == "pass"
    process(tmp_path, 20, 1, "python -u -m trainers.ddp --config x", "/dev/null")
    result, text = host_checks.leftovers(bare(tmp_path, gpus=2))
    assert (result, "this machine: pid 20 of no launch of yours" in text) == ("unknown", True), text
    process(tmp_path, 21, 1, "python scripts/train_showcase.py --steps 5", "/dev/nvidia1")
    result, text = host_checks.leftovers(bare(tmp_path, gpus=2))
    assert (result, "have GPUs open: pid 21 of no launch" in text) == ("fail", True), text
    result, text = host_checks.leftovers(bare(tmp_path))
    assert (result, "pid 20 21 of no launch" in text) == ("pass", True), text
    assert "kill" not in text
    assert "--end-leftovers" not in text


def test_only_the_trainers_of_a_dead_supervisor_are_to_be_ended(tmp_path):
    run = tmp_path / "launch/0-train"
    rundir.make_directory(run)
    rundir.write_json(run / rundir.RUN, {"environment": {environ.TOKEN: "c0ffee"}})
    ours = {environ.RUN_DIR: str(run), environ.TOKEN: "c0ffee"}
    process(tmp_path, 20, 1, "python -u -m trainers.ddp", **ours)
    process(tmp_path, 21, 1, "python -u -m trainers.ddp")
    assert host_checks.leftovers(bare(tmp_path)) == (
        "pass",
        "trainers without a supervisor share this machine: pid 20 of a dead supervisor: check PLAN "
        "--end-leftovers ends them; pid 21 of no launch of yours (started by hand?): wait for "
        "them, or ask their owner",
    )


def test_the_ranks_of_other_trainings_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(host_checks.os, "sched_getaffinity", lambda _: range(6))
    process(tmp_path, 10, 1, "python -P -m console.supervisor /launch")
    assert host_checks.cores(bare(tmp_path)) == ("pass", "2 processes on 6 cores")
    monkeypatch.setattr(Case, "nproc", 1)
    assert host_checks.cores(bare(tmp_path)) == ("pass", "1 process on 6 cores")
    monkeypatch.undo()
    monkeypatch.setattr(host_checks.os, "sched_getaffinity", lambda _: range(6))
    ours = {environ.TOKEN: "c0ffee"}
    process(tmp_path, 11, 10, "python -m torch.distributed.run -m trainers.ddp", **ours)
    process(tmp_path, 12, 11, "python -u foreign.py", **ours, RANK="0")
    process(tmp_path, 13, 12, "a child of this rank", **ours, RANK="0")
    process(tmp_path, 14, 11, "python -u foreign.py", **ours, RANK="1")
    two = "2 processes and 2 of other trainings on 6 cores"
    assert host_checks.cores(bare(tmp_path)) == ("pass", two)
    process(tmp_path, 20, 1, "torchrun --nproc-per-node 2 -m trainers.ddp")
    process(tmp_path, 21, 20, "python -u -m trainers.ddp", RANK="0", MASTER_PORT="29500")
    process(tmp_path, 22, 20, "python -u -m trainers.ddp", RANK="1", MASTER_PORT="29500")
    process(tmp_path, 30, 1, "python -u -m trainers.fsdp")
    assert host_checks.cores(bare(tmp_path)) == (
        "unknown",
        "2 processes and 5 of other trainings on 6 cores: they share cores and run slower",
    )


def test_a_trainer_whose_run_was_adopted_is_no_leftover(tmp_path):
    """An adopted rank does not descend from its supervisor; lock and run.json show its adoption."""
    run = tmp_path / "launch/0-train"
    rundir.make_directory(run)
    rundir.write_json(run / rundir.RUN, {"environment": {environ.TOKEN: "c0ffee"}})
    for pid, token in ((20, "c0ffee"), (21, "other"), (22, "")):
        process(tmp_path, pid, 1, "python -u -m trainers.ddp", "/dev/nvidia0")
        named = f"{environ.RUN_DIR}={run}\0{environ.TOKEN}={token}\0"
        (tmp_path / f"proc/{pid}/environ").write_text(named)
    found = [host_checks.unsupervised(tmp_path / "proc")]
    with (run.parent / rundir.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found.append(host_checks.unsupervised(tmp_path / "proc"))
        run.chmod(0o777)
        found.append(host_checks.unsupervised(tmp_path / "proc"))
    assert found == [[20, 21, 22], [21, 22], [20, 21, 22]]
