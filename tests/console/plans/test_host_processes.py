"""The rows of the preflight about the other processes, the memory and the cores of the host."""

from __future__ import annotations

import fcntl

from console.plans import host_checks
from tests.console.plans.test_preflight import bare
from tests.console.sources import directory
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
    assert (result, "share this machine: pid 20; check" in text) == ("unknown", True), text
    process(tmp_path, 21, 1, "python scripts/train_showcase.py --steps 5", "/dev/nvidia1")
    result, text = host_checks.leftovers(bare(tmp_path, gpus=2))
    assert (result, "have GPUs open: pid 21; check" in text) == ("fail", True), text
    result, text = host_checks.leftovers(bare(tmp_path))
    assert (result, "pid 20 21; check PLAN --end-leftovers lists" in text) == ("pass", True), text


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


def test_memory_and_cores_are_those_that_the_limit_of_the_cgroup_allows(tmp_path, monkeypatch):
    directory.cgroup(tmp_path, monkeypatch, **{"memory.max": "max", "cpu.max": "max 100000"})
    assert host_checks.memory(bare(tmp_path, nproc=1))[1].endswith(" of the host's memory is free")
    assert "limit" not in host_checks.cores(bare(tmp_path))[1]
    directory.cgroup(tmp_path, monkeypatch, **{
        "memory.max": f"{2 << 30}", "memory.current": f"{3 << 29}", "cpu.max": "50000 100000",
        "memory.stat": f"inactive_file {1 << 29}\n",
    })  # fmt: skip
    text = "1.0 GiB of the memory within the limit of the cgroup is free"
    assert host_checks.memory(bare(tmp_path, nproc=2)) == ("pass", text)
    short = ("fail", f"{text}; the ranks need 2.0 GiB")
    assert host_checks.memory(bare(tmp_path, nproc=4)) == short
    text = "2 processes on 1 core (limit of the cgroup): they share cores and run slower"
    assert host_checks.cores(bare(tmp_path, nproc=2)) == ("unknown", text)
