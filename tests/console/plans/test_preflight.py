"""A fault that is planted before a launch makes the row that names it fail or warn."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from console import actions, plan
from console.actions import LaunchOptions
from console.plans import catalog, config_checks, gpu_checks, host_checks, preflight
from console.plans.case import Case
from tests.mounts import tmpfs
from trainers import manifest
from trainers.contract import rundir

TINY = {"name": "one", "config": "configs/tiny_cpu.yaml", "nproc": 2}
ROOT = Path(__file__).parents[3]


def prepared(folder, sets=None, assume="", phase=None, root=None, **document):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", "phases": [TINY | (phase or {})]} | document))
    options = LaunchOptions(
        str(path), sets=sets or {}, root=root or folder / "artifacts", assume_gpus=assume
    )
    return actions.prepare(options)


def row(name, *args, **more):
    """Returns result and text of one row for a plan of one phase, by default at toy size."""
    return next((c.result, c.text) for c in prepared(*args, **more).checks if c.name == name)


def bare(root, gpus=0, nproc=2, host=None, **more):
    """Returns a case without settings; `host`, or else `root`, has the files of its host."""
    phase = {"name": "one", "script": "x.py", "nproc": nproc, **more}
    given = plan.parse({"name": "mine", "gpus": gpus, "phases": [phase]}, "test")
    return Case(given, root / "launch", settings=({},), root=host or root)


def test_a_disk_that_cannot_hold_the_checkpoints_of_the_plan_is_refused(tmp_path):
    kept = {"checkpoint.every": "10", "train.steps": "2000000", "checkpoint.keep_every": "10"}
    result, text = row("disk", tmp_path, kept | {"model.mlp_hidden": "4096"})
    assert (result, "for checkpoints); free space" in text) == ("fail", True), text
    result, text = row("disk", tmp_path, {"checkpoint.every": "10"})
    assert (result, text.endswith("1.0 GiB are needed")) == ("pass", True)
    # 1.1 GiB × (3 newest and the one that is written) for each phase, and 1 GiB for the records
    large, two = {"checkpoint.every": "10", "model.mlp_hidden": "131072"}, TINY | {"name": "two"}
    for phases, needed in (([TINY], "5.5 GiB"), ([TINY, two], "10.0 GiB")):
        assert needed in row("disk", tmp_path, large, phases=phases)[1]


def test_the_page_on_plans_has_the_time_limits():
    driver, network = (preflight.LIMIT_S[x] for x in (preflight.DRIVER, preflight.DATA))
    usual = f"{preflight.USUAL_S:g} s after the start of the preflight"
    limits = f"{usual} (`gpus`, `driver` and `gpu memory`: {driver:g} s; `data`: {network:g} s)"
    assert limits in " ".join((ROOT / "docs" / "plans.md").read_text().split())
    rows = [row.name for row in preflight.TABLE if row.needs in preflight.LIMIT_S]
    assert rows == ["gpus", "driver", "gpu memory", "data"]


@pytest.mark.parametrize("package", ["mine", "console"])
def test_a_module_of_the_working_directory_is_found_as_the_ranks_find_it(
    tmp_path, monkeypatch, package
):
    """The working directory is first in the path of a foreign program, and not in that of ours."""

    def found(module: str) -> tuple[str, str]:
        phases = [{"name": "one", "module": module}]
        return config_checks.program(
            Case(plan.parse({"name": "x", "phases": phases}, ""), tmp_path)
        )

    missing = f"phase 'one': there is no module {package}.start; install it, or correct 'module'"
    assert found(f"{package}.start") == ("fail", missing)
    for name in (package, "trainers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "start.py").touch()
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert found(f"{package}.start") == ("pass", f"{package}.start")
    assert found(f"{package}.other")[0] == "fail"
    assert found("trainers.ddp")[0] == "pass"  # the folder `trainers` here has no ddp


@pytest.mark.parametrize("pattern", ["/absolute/*.md", "**x"])
def test_a_check_that_cannot_be_made_fails_by_name(tmp_path, pattern):
    sets = {"data.source": "text", "data.path": str(tmp_path), "data.pattern": pattern}
    result, text = row("data", tmp_path, sets)
    assert (result, text.startswith("the check itself failed: ")) == ("fail", True), text


@pytest.fixture
def full(tmp_path):
    with tmpfs(tmp_path, 1) as mounted:
        yield mounted


def test_a_full_disk_is_refused(tmp_path, full):
    result, text = row("disk", tmp_path, root=full)
    assert (result, text.startswith(f"{full} has 1.0 MiB free, and the launch needs 1.0 GiB")) == (
        "fail", True,
    ), text  # fmt: skip


def test_free_space_that_the_file_system_does_not_report_is_a_warning(tmp_path):
    found = config_checks.disk(replace(bare(tmp_path), directory=Path("/proc/launch")))
    text = "the file system of /proc does not report its space; the launch needs 1.0 GiB"
    assert found == ("unknown", text)


def test_a_run_to_resume_that_has_no_readable_checkpoint_is_refused(tmp_path):
    run = tmp_path / "run"
    for where, wanted in ((tmp_path / "none", "there is none"), (__file__, "cannot list"),
                          (run, "has no readable manifest.json")):  # fmt: skip
        (run / "checkpoints" / "step_00000007").mkdir(parents=True, exist_ok=True)
        result, text = row("resume", tmp_path, {"checkpoint.resume": str(where)})
        assert (result, wanted in text) == ("fail", True), text
    record = {"format": manifest.FORMAT, "step": 7, "tokens_total": 1, "world": 2, "data": {},
              "report": {}, "settings": {}, "files": {"x": [1, "0"]}}  # fmt: skip
    rundir.write_json(run / "checkpoints" / "step_00000007" / manifest.MANIFEST, record)
    found = row("resume", tmp_path, {"checkpoint.resume": str(run)})
    path = run / "checkpoints" / "step_00000007"
    assert found == ("pass", f"one resumes from {path} if it is intact")
    sets = {"checkpoint.resume": str(run), "checkpoint.from_step": "5"}
    assert "has no verified checkpoint of step 5" in row("resume", tmp_path, sets)[1]


def test_a_resume_needs_the_space_of_the_checkpoints_that_it_still_saves(tmp_path):
    """All 2,000,000 checkpoints do not fit; the last ones of the phase do."""
    sets = {"checkpoint.every": "1", "train.steps": "2000000", "checkpoint.keep_every": "1"}
    record = {"format": manifest.FORMAT, "step": 1_999_995, "tokens_total": 1, "world": 2,
              "data": {}, "report": {}, "settings": {}, "files": {"x": [1, "0"]}}  # fmt: skip
    path = tmp_path / "run" / "checkpoints" / "step_01999995"
    path.mkdir(parents=True)
    rundir.write_json(path / manifest.MANIFEST, record)
    assert row("disk", tmp_path, sets)[0] == "fail"
    result, text = row("disk", tmp_path, sets | {"checkpoint.resume": str(tmp_path / "run")})
    assert (result, text.endswith("1.0 GiB are needed")) == ("pass", True), text


def test_a_phase_may_resume_from_an_earlier_phase_of_its_launch(tmp_path):
    """With --run-dir, the directory of each phase is known before the launch."""
    case = bare(tmp_path)
    settings = {"checkpoint.resume": {"value": str(case.directory / "0-zero")}}
    found = config_checks.resume(replace(case, settings=(settings,)))
    assert found == ("pass", "no phase resumes from another run")


@pytest.mark.parametrize("below", ["", "launch"])
def test_a_launch_directory_that_is_a_file_or_in_a_file_is_refused(tmp_path, below):
    (tmp_path / "taken").write_text("x")
    case = replace(bare(tmp_path), directory=tmp_path / "taken" / below)
    result, text = config_checks.directory(case)
    assert (result, "taken is not a directory; pass another" in text) == ("fail", True), text


def test_shared_memory_that_is_too_small_for_nccl_is_refused_and_for_pulses_a_warning(
    tmp_path, full
):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/shm").symlink_to(full)
    assert host_checks.shm(bare(tmp_path, nproc=1))[0] == "pass"
    result, text = host_checks.shm(bare(tmp_path, gpus=2))
    assert (result, "128.0 MiB are needed; start the container with --shm-size" in text) == (
        "fail", True,
    ), text  # fmt: skip
    assert host_checks.shm(bare(tmp_path))[0] == "unknown"
    (tmp_path / "dev/shm").unlink()
    assert host_checks.shm(bare(tmp_path))[0] == "unknown"


PORTS = """
import pathlib, socket, subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("50000 50001")
from console.plans import host_checks
print(host_checks.ports(None)[0])
held = [socket.create_server(("127.0.0.1", port)) for port in (50000, 50001)]
print(*host_checks.ports(None))
"""


def test_ports_that_are_all_in_use_are_refused():
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", PORTS], capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        pytest.skip(f"this machine cannot make a network for a test: {done.stderr[-200:]}")
    first, second = done.stdout.splitlines()
    assert first == "pass"
    assert second.startswith("fail no free port on 127.0.0.1 (Address already in use)")


def test_a_data_set_that_is_missing_is_refused(tmp_path):
    phase = {"set": {"data.source": "jsonl", "data.path": str(tmp_path / "empty")}}
    (tmp_path / "empty").mkdir()
    for name, content in (("another ending.txt", "x"), (".hidden.jsonl", "{}"), ("no.jsonl", "")):
        (tmp_path / "empty" / name).write_text(content)
        result, text = row("data", tmp_path, phase=phase)
        assert (result, f"{tmp_path / 'empty'} has no jsonl file **/*" in text) == ("fail", True)
    (tmp_path / "empty/linked").symlink_to(tmp_path)
    assert "folders that are links: linked;" in row("data", tmp_path, phase=phase)[1]
    (tmp_path / "empty/a.jsonl").write_text("{}")
    assert row("data", tmp_path, phase=phase) == ("pass", "jsonl")
    result, text = row(
        "data", tmp_path, phase={"set": phase["set"] | {"data.source": "fineweb_edu"}}
    )
    assert (result, "has no README.md: it is not a mirror" in text) == ("fail", True)


def test_a_hub_that_is_dead_is_refused_within_a_second(tmp_path, monkeypatch):
    hub = {"set": {"data.source": "fineweb_edu"}}
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert row("data", tmp_path, phase=hub) == ("pass", "fineweb_edu")
    begun = time.monotonic()
    result, text = row("data", tmp_path, phase=hub)
    assert (result, "127.0.0.1 does not answer, so HuggingFaceFW" in text) == ("fail", True)
    assert time.monotonic() - begun < 30
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in row("data", tmp_path, phase=hub)[1]
    result, text = row("data", tmp_path, phase=hub, gpus=2, assume="2xA100")
    assert (result, text.startswith("on this machine: ")) == ("unknown", True)


def test_a_tokenizer_without_its_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    sets = {"data.source": "text", "data.tokenizer": "gpt2", "model.vocab_size": 50257}
    result, text = row("data", tmp_path, phase={"set": sets})
    assert result == "fail"
    assert "pip install" in text or f"missing, unreadable or damaged in {tmp_path};" in text


def earlier(folder, ahead_s, file_ahead_s):
    """Writes a launch; its creation and its plan.json are this many seconds ahead of the clock."""
    launch = folder / "artifacts" / "mine" / "20261120-031500"
    launch.mkdir(parents=True, exist_ok=True)
    now = time.time()
    rundir.write_json(launch / rundir.PLAN, {"v": 1, "created_ts": now + ahead_s})
    os.utime(launch / rundir.PLAN, (now + file_ahead_s, now + file_ahead_s))


def test_a_clock_that_was_set_back_is_refused(tmp_path):
    """If only one of the two times is in the future, the launch is not rejected."""
    assert row("clock", tmp_path)[0] == "pass"
    for ahead_s, file_ahead_s in ((-1000, -1000), (7200, 0), (0, 7200)):
        earlier(tmp_path, ahead_s, file_ahead_s)
        assert row("clock", tmp_path) == ("pass", "not behind the newest launch")
    earlier(tmp_path, 7200, 7200)
    result, text = row("clock", tmp_path)
    assert (result, "behind the launch 20261120-031500" in text) == ("fail", True), text


LIMITS = [
    (resource.RLIMIT_NOFILE, 600, {}, "unknown", "only 600 open files"),
    (resource.RLIMIT_FSIZE, 1 << 20, {}, "fail", "files of at most 1.0 MiB are allowed"),
    (resource.RLIMIT_AS, 1 << 40, {"gpus": 2, "assume": "2xA100"}, "unknown", "CUDA needs more"),
]


@pytest.mark.parametrize(("limit", "value", "more", "result", "text"), LIMITS)
def test_a_limit_of_the_shell_that_a_training_would_meet_is_refused(
    tmp_path, limit, value, more, result, text
):
    given = prepared(tmp_path, **more)
    case = Case(given.plan, tmp_path, settings=tuple(p["settings"] for p in given.phases))
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        found = host_checks.limits(case)
    finally:
        resource.setrlimit(limit, before)
    assert (found[0], text in found[1]) == ("fail" if more else result, True), found


def test_a_phase_that_cannot_fit_into_a_gpu_is_refused(tmp_path):
    gpus = {"gpus": 2, "assume": "2xA100-40"}
    production = {"phase": {"config": "configs/m7c_125m_2xa100_production.yaml"}}
    result, text = row("gpu memory", tmp_path, **gpus, **production)
    assert (result, "at least 1.8 GiB of 40.0 GiB per GPU" in text) == ("pass", True), text
    large = {"train.batch_size": "256"}
    result, text = row("gpu memory", tmp_path, large, **gpus, **production)
    assert (result, "lower train.batch_size" in text) == ("fail", True), text
    fsdp = {"model.dim": "16384", "model.n_heads": "128", "model.mlp_hidden": "4096"}
    assert row("gpu memory", tmp_path, fsdp, **gpus, **production)[0] == "fail"
    some = large | {"train.recompute": "0:11"}
    less = row("gpu memory", tmp_path, some, **gpus, **production)[1]
    assert less != row("gpu memory", tmp_path, large, **gpus, **production)[1]


FSDP, NO_GC = {"train.strategy": "fsdp"}, {"ddp.disable_gc": "true"}
FP64 = {"train.precision": "fp64", "train.batch_size": "1"}
FP32 = {"train.precision": "fp32", "train.batch_size": "2"}
ALL = {"train.recompute": "all"}


@pytest.mark.parametrize(
    ("nproc", "sets", "like_nproc", "like"),
    [
        (8, FSDP | {"fsdp.replicas": "4"}, 2, FSDP), (2, FSDP | FP64, 1, FP32),
        (2, ALL | NO_GC, 2, {"train.recompute": "none"}), (1, ALL | NO_GC, 1, ALL),
        (2, FSDP | ALL | NO_GC, 2, FSDP | ALL),
    ],
)  # fmt: skip
def test_the_memory_that_a_phase_needs_follows_its_replicas_precision_and_recompute(
    tmp_path, nproc, sets, like_nproc, like
):
    phase = {"config": "configs/m7c_125m_2xa100_production.yaml"}
    found = [
        row("gpu memory", tmp_path, {"train.strategy": "ddp"} | given, gpus=ranks,
            assume=f"{ranks}xA100-40", phase=phase | {"nproc": ranks})
        for ranks, given in ((nproc, sets), (like_nproc, like))
    ]  # fmt: skip
    assert found[0] == found[1]


def test_settings_of_nccl_that_slow_it_down_are_warnings(tmp_path):
    flags = {"NCCL_DEBUG": "INFO", "NCCL_P2P_DISABLE": 1, "NCCL_PROTO": "LL,Simple"}
    result, text = gpu_checks.nccl(bare(tmp_path, gpus=2, flags=flags))
    assert result == "unknown"
    for part in ("NCCL_DEBUG=INFO slows", "NCCL_P2P_DISABLE=1 copies"):
        assert part in text
    assert "PROTO" not in text
    assert gpu_checks.nccl(bare(tmp_path)) == ("pass", "no GPU is needed")
    foreign = config_checks.gpu_memory(bare(tmp_path, gpus=2))
    assert foreign == ("pass", "a foreign program, not checked")


@pytest.mark.parametrize(
    ("git", "gpus", "result", "text"),
    [({}, 2, "unknown", "no git repository"), ({}, 0, "pass", "no git"),
     ({"sha": "a" * 40, "dirty": True}, 2, "unknown", "local changes"),
     ({"sha": "a" * 40, "dirty": False}, 2, "pass", "a" * 12)],
)  # fmt: skip
def test_code_that_no_commit_holds_is_a_warning_for_a_plan_on_gpus(
    tmp_path, monkeypatch, git, gpus, result, text
):
    monkeypatch.setattr(catalog, "PROJECT", tmp_path)
    given = plan.parse({"name": "mine", "gpus": gpus, "phases": [{"name": "one"}]}, "test")
    found = host_checks.code(Case(given, tmp_path, git=git))
    assert (found[0], text in found[1]) == (result, True)


def test_a_repository_that_git_does_not_read_is_not_missing(tmp_path, monkeypatch):
    """For example, the repository of another user is mounted into a container of root."""
    monkeypatch.setattr(catalog, "PROJECT", tmp_path / "code")
    (tmp_path / ".git").mkdir()
    found = host_checks.code(bare(tmp_path))
    assert found == ("pass", "git cannot report the commit of the code; see "
                     f"git -C {tmp_path / 'code'} rev-parse HEAD")  # fmt: skip


@pytest.mark.parametrize(
    ("needs", "result"), [(preflight.DATA, "fail"), (preflight.PROCESSES, "unknown")]
)
def test_a_row_that_hangs_is_said_soon_and_fails_alone(tmp_path, monkeypatch, needs, result):
    """A read of a process in state D may never return, so a row about processes only warns."""
    end = threading.Event()
    hanging = preflight.Row("stuck", lambda case: (end.wait(600), ("pass", ""))[1], needs)
    monkeypatch.setattr(preflight, "TABLE", (*preflight.TABLE[:1], hanging))
    monkeypatch.setattr(preflight, "LIMIT_S", {needs: preflight.SAID_S + 0.5})
    said: list[str] = []
    try:
        torch, stuck = preflight.run(bare(tmp_path), said.append)[:2]
    finally:
        end.set()
    assert said == [f"the preflight is still waiting for {needs}"]
    assert torch.result == "pass"
    assert (stuck.result, stuck.text) == (result, f"no answer from {needs} within 2.5 s")
    assert preflight.SAID_S <= 3
