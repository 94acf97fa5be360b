"""Launches and requests of an operator: their files, and the reasons to reject them."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from console import actions
from console.actions import LaunchOptions
from console.supervisor import launch_spec
from tests.console.sources import directory
from tests.console.test_cli import cli
from tests.launches import HANG_GUARD_S, PROGRAMS, STUB, Started, phase, write_plan
from trainers.contract import rundir
from trainers.contract.errors import ContractError, RefusedError, UsageError

ROOT = Path(__file__).parents[2]
MEMBER = PROGRAMS / "member.py"
RACERS = 50
PHASES = [phase("one", "member.py", 100_000), phase("two", "member.py", 5)]


def plan(folder: Path, **more) -> str:
    return str(write_plan(folder, **{"phases": PHASES} | more))


def options(folder: Path, **more) -> LaunchOptions:
    return LaunchOptions(**{"plan": plan(folder), "root": folder / "artifacts"} | more)


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- before a launch --------------------------------------------------------------------------


def test_a_plan_that_changed_after_its_check_is_not_launched(tmp_path):
    chosen = options(tmp_path)
    digest = actions.prepare(chosen).digest
    assert actions.prepare(replace(chosen, measure=False)).digest == digest
    plan(tmp_path, phases=PHASES[:1])
    prepared = actions.prepare(replace(chosen, digest=digest))
    assert prepared.digest != digest
    with pytest.raises(RefusedError, match="tested has changed since it was checked"):
        actions.begin(prepared, "x")
    done = cli(tmp_path, "launch", chosen.plan, "--digest", digest)
    assert (done.returncode, "has changed since" in done.stderr) == (4, True)
    assert not chosen.root.exists()


def test_a_config_of_the_project_stays_the_same_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = actions.prepare(LaunchOptions("cpu_smoke", root=tmp_path / "artifacts"))
    before = [launch_spec.argv(each, 1.0, tmp_path) for each in found.spec.plan.phases]
    for each in found.spec.plan.phases:
        own = Path("configs", Path(each.config).name)
        own.parent.mkdir(exist_ok=True)
        own.touch()
    assert [launch_spec.argv(each, 1.0, tmp_path) for each in found.spec.plan.phases] == before


def test_a_config_of_the_working_directory_stays_the_same_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "configs" / "tiny_cpu.yaml"
    shutil.copytree(ROOT / "configs", own.parent)
    chosen = LaunchOptions(config=Path("configs/tiny_cpu.yaml"), root=tmp_path / "artifacts")
    (phase,) = actions.prepare(chosen).spec.plan.phases
    own.unlink()
    assert str(own) in launch_spec.argv(phase, 1.0, tmp_path)


def test_preparing_writes_nothing_and_shows_command_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    chosen = options(tmp_path, flags={"NCCL_DEBUG": "warn"}, nproc=3, devices="0,1")
    before = listing(tmp_path)
    prepared = actions.prepare(chosen)
    assert listing(tmp_path) == before == ["tested.yaml"]
    assert [phase["phase"] for phase in prepared.phases] == ["one", "two"]
    first = prepared.phases[0]
    argv, environment = first["argv"], first["environment"]
    assert argv[1:4] == ["-P", "-m", "torch.distributed.run"]
    assert argv[argv.index("--nproc-per-node") + 1] == "3"
    assert argv[argv.index("--max-restarts") + 1] == "0"
    assert environment["NCCL_DEBUG"] == "WARN"
    assert first["flags"]["NCCL_DEBUG"]["origin"] == "--flag"
    assert first["flags"]["CUDA_VISIBLE_DEVICES"]["origin"] == "--devices"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert str(ROOT) in environment["PYTHONPATH"]
    text = "\n".join(prepared.lines())
    assert "NCCL_DEBUG=WARN" in text
    assert prepared.as_dict()["phases"][0]["shell"] in text


def test_only_a_foreign_program_finds_other_packages_before_those_of_this_project(
    tmp_path, monkeypatch
):
    """The program may have its own package `trainers`. PYTHONPATH is that of a supervisor."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:/mine")
    foreign = actions.prepare(options(tmp_path)).phases[0]
    ours = actions.prepare(LaunchOptions(plan="cpu_smoke", root=tmp_path)).phases[0]
    assert foreign["environment"]["PYTHONPATH"] == f"/mine:{ROOT}"
    assert ours["environment"]["PYTHONPATH"] == f"{ROOT}:/mine"
    adopting = launch_spec.inherited(foreign["environment"])
    assert adopting["PYTHONPATH"] == f"{ROOT}:/mine"


def test_the_password_of_a_proxy_is_inherited_but_neither_shown_nor_recorded(tmp_path, monkeypatch):
    proxies = {"http_proxy": "http://ann:hun/ter22@proxy:3128", "HTTPS_PROXY": "ann:ter22@proxy:8",
               "no_proxy": "localhost"}  # fmt: skip
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    prepared = actions.prepare(options(tmp_path))
    shown = prepared.phases[0]["environment"]
    assert [shown[name] for name in proxies] == [
        "http://[removed]@proxy:3128", "[removed]@proxy:8", "localhost",
    ]  # fmt: skip
    assert "ter22" not in "\n".join(prepared.lines())
    used = launch_spec.environment(prepared.plan.phases[0], {}, {})
    assert {name: used[name] for name in proxies} == proxies


def test_our_flags_in_the_shell_are_taken_with_their_origin_below_the_command_line(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("NSA_LR", "7")
    monkeypatch.setenv("NSA_ACCUM", "2")
    chosen = LaunchOptions(plan="cpu_smoke", root=tmp_path, flags={"NSA_LR": "0.5"})
    phase = actions.prepare(chosen).phases[0]
    assert phase["flags"]["NSA_LR"] == {"value": "0.5", "origin": "--flag"}
    assert phase["flags"]["NSA_ACCUM"] == {"value": "2", "origin": "shell"}
    assert phase["environment"]["NSA_ACCUM"] == "2"
    assert phase["settings"]["train.accumulate"] == {"value": 2, "origin": "flag NSA_ACCUM"}
    monkeypatch.setenv("NSA_ACUM", "2")
    with pytest.raises(UsageError, match="did you mean 'NSA_ACCUM'"):
        actions.prepare(chosen)


def test_a_flag_that_the_plan_overrides_with_its_set_is_rejected(tmp_path):
    phases = [{"name": "one"}, {"name": "two", "set": {"train.accumulate": 2}}]
    chosen = LaunchOptions(plan(tmp_path, phases=phases), root=tmp_path, flags={"NSA_ACCUM": "4"})
    says = "'two' sets train.accumulate, which overrides NSA_ACCUM; .* --set train.accumulate=4"
    with pytest.raises(UsageError, match=says):
        actions.prepare(chosen)
    (first,) = actions.prepare(replace(chosen, phase="one")).phases
    assert first["settings"]["train.accumulate"]["value"] == 4


def test_our_own_trainer_is_resolved_with_an_origin_for_each_setting(tmp_path):
    chosen = LaunchOptions(
        plan="cpu_smoke", root=tmp_path, phase="plumbing",
        sets={"train.steps": "7"}, flags={"NSA_LR": "0.5"},
    )  # fmt: skip
    (phase,) = actions.prepare(chosen).phases
    assert phase["settings"]["train.steps"] == {"value": 7, "origin": "--set"}
    assert phase["settings"]["train.lr"] == {"value": 0.5, "origin": "flag NSA_LR"}
    assert phase["settings"]["data.source"]["origin"] == "plan"
    assert "train.steps=7" in phase["argv"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"flags": {"NSA_ACCUM": "0"}}, "from 1 to 65536"),
        (
            {"plan": "cpu_smoke", "flags": {"NSA_DDP_STATIC_GRAPH": "1", "NSA_ACCUM": "2"}},
            "is rejected",
        ),
        ({"run_dir": Path("x" * 300)}, "cannot be used as a directory: File name too long"),
    ],
)
def test_wrong_words_are_usage_errors_and_write_nothing(tmp_path, more, says):
    with pytest.raises(UsageError, match=says):
        actions.launch(options(tmp_path, **more), "tester")
    assert listing(tmp_path) == ["tested.yaml"]


def test_a_failed_check_refuses_with_its_sentence(tmp_path):
    phases = [{"name": "one", "script": "nowhere.py"}]
    chosen = LaunchOptions(plan=plan(tmp_path, phases=phases), root=tmp_path / "artifacts")
    with pytest.raises(RefusedError, match=r"nowhere\.py"):
        actions.launch(chosen, "tester")
    assert listing(tmp_path) == ["tested.yaml"]


# --- the directory ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "lock", "says"),
    [
        ('{"launch": "tested-1"}', True, "contains the launch tested-1; pass another"),
        ('{"launch": "tested-1"}', False, "contains the launch"),
        ('{"mine": 1}', True, "contains the launch"),
    ],
)
def test_a_directory_of_another_launch_or_plan_is_refused(tmp_path, content, lock, says):
    done = tmp_path / "done"
    done.mkdir()
    (done / rundir.PLAN).write_text(content)
    if lock:
        (done / rundir.LOCK).touch()
    (done / rundir.PLAN_STATE).write_text('{"state": "ended"}')
    with pytest.raises(RefusedError, match=says):
        actions.launch(options(tmp_path, run_dir=done), "tester")
    assert (done / rundir.PLAN).read_text() == content


@pytest.mark.parametrize("named", [".", "exp8/..", "../exp7"])
def test_the_id_is_the_name_of_the_given_directory(tmp_path, monkeypatch, named):
    (tmp_path / "exp7" / "exp8").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "exp7")
    prepared = actions.prepare(options(tmp_path, run_dir=Path(named)))
    assert (prepared.spec.launch, prepared.phases[0]["run"]) == ("exp7", "exp7/0-one")


def test_a_file_as_a_launch_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="is not a directory"):
        actions.launch(options(tmp_path, run_dir=tmp_path / "file"), "tester")


def test_a_supervisor_that_cannot_start_leaves_nothing(tmp_path, monkeypatch):
    """Another package `console` hides the project, so the supervisor fails at its start."""
    hiding = tmp_path / "no-project"
    (hiding / "console").mkdir(parents=True)
    (hiding / "console" / "__init__.py").touch()
    monkeypatch.setattr("console.supervisor.launch_spec.PROJECT", hiding)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError, match=r"the supervisor did not start: .*No module named"):
        actions.launch(options(tmp_path), "tester")
    assert listing(tmp_path / "artifacts") == ["tested"]


# --- one launch, many launchers ---------------------------------------------------------------


def _race(prepared: actions.Prepared, gate, results) -> None:
    gate.wait()
    try:
        results.put(("won", str(actions.begin(prepared, "racer"))))
    except RefusedError as error:
        results.put(("refused", str(error)))
    except BaseException as error:
        results.put(("broken", repr(error)))


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """Fifty launches into one directory at the same moment. The launch that won continues."""
    folder = tmp_path_factory.mktemp("race")
    # The preflight runs once, before the race: fifty together would exceed their time limits.
    prepared = actions.prepare(options(folder, run_dir=folder / "one"))
    context = multiprocessing.get_context("fork")
    gate, results = context.Event(), context.Queue()
    racers = [context.Process(target=_race, args=(prepared, gate, results)) for _ in range(RACERS)]
    for racer in racers:
        racer.start()
    gate.set()
    found = [results.get(timeout=HANG_GUARD_S) for _ in racers]
    for racer in racers:
        racer.join()
    started = Started(folder / "one")
    try:
        # The launcher may return before the directory of the first phase exists.
        started.wait(lambda: started.runs() and started.state())
        yield folder / "one", found
    finally:
        started.clean()


def test_exactly_one_of_fifty_launches_wins_and_the_others_say_who_did(raced):
    path, found = raced
    outcomes = [outcome for outcome, _ in found]
    assert outcomes.count("won") == 1
    assert outcomes.count("refused") == RACERS - 1, [f for f in found if f[0] == "broken"]
    assert len(list(path.glob("0-*"))) == 1
    refused = [text for outcome, text in found if outcome == "refused"]
    assert all("is in use by" in text and "--run-dir" not in text for text in refused), refused


def test_a_later_launch_into_the_live_directory_names_the_owner(raced):
    path, _ = raced
    owner = rundir.read_json(path / rundir.PLAN_STATE)["supervisor"]["pid"]
    with pytest.raises(RefusedError, match=rf"the launch one: pid {owner} of .* for \d+"):
        actions.launch(options(path.parent, run_dir=path), "tester")


@pytest.mark.parametrize("wins", ["has its lock", "has ended"])
def test_a_launch_whose_directory_another_launch_took_gets_the_next_name(
    tmp_path, begin, monkeypatch, wins
):
    monkeypatch.setenv("PYTHONPATH", STUB["PYTHONPATH"])
    monkeypatch.setattr(actions.time, "strftime", lambda *_: "20261126-211736")
    first, second = (actions.prepare(options(tmp_path)) for _ in range(2))
    assert first.directory == second.directory
    if wins == "has ended":
        rundir.make_directory(first.directory)
        for name in (rundir.PLAN, rundir.PLAN_STATE):
            rundir.write_json(first.directory / name, {"launch": "other", "state": "ended"})
    else:
        begin.adopt(actions.begin(first, "first"))
    started = begin.adopt(actions.begin(second, "second"))
    assert started.path == first.directory.with_name("20261126-211736-2")
    assert rundir.read_json(started.path / rundir.PLAN)["launch"] == "tested-20261126-211736-2"
    third = begin.adopt(actions.begin(second, "third"))
    assert third.path.name == "20261126-211736-3"
    started.wait_steps(1)


def holders(file: Path) -> list[int]:
    """Returns the pids of the processes that have the file open."""
    found = []
    for pid in psutil.pids():
        try:
            links = {os.readlink(f.path) for f in os.scandir(f"/proc/{pid}/fd")}
        except OSError:
            continue
        if str(file) in links:
            found.append(pid)
    return found


def test_the_supervisor_holds_the_lock_and_its_children_do_not(raced):
    path, _ = raced
    state = rundir.read_json(path / rundir.PLAN_STATE)
    with (path / rundir.LOCK).open() as stream, pytest.raises(BlockingIOError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # A child has the descriptor until it executes its program.
    Started(path).wait(lambda: holders(path / rundir.LOCK) == [state["supervisor"]["pid"]])
    assert path.stat().st_mode & 0o777 == 0o700


def test_requests_find_the_right_mailbox(raced):
    path, _ = raced
    run = next(path.glob("0-*"))
    sent = actions.send(run, "set-flag", {"name": "NCCL_DEBUG", "value": "INFO"}, "tester")
    assert actions.answer(run, sent, HANG_GUARD_S)["ok"]
    assert actions.answer(path, "never-sent", 0.1) is None


def test_halt_works_without_a_supervisor_and_nothing_else_does(raced):
    path, _ = raced
    run = next(path.glob("0-*"))
    Started(path).kill_supervisor()
    with pytest.raises(RefusedError, match=r"supervisor of .* is not running"):
        actions.send(run, "dump", {}, "tester")
    with pytest.raises(RefusedError, match=r"supervisor of .* is not running"):
        actions.send(path, "set-flag", {"name": "NSA_LR", "value": "1"}, "tester")
    request = actions.send(path, "halt", {}, "tester")
    assert actions.answer(path, request, 1)["ok"]
    assert (run / rundir.HALT).exists()


def test_a_halt_is_not_written_through_a_link_in_somebodys_launch(tmp_path):
    """An unpacked launch may name any directory as its current run."""
    outside = tmp_path / "outside"
    outside.mkdir()
    path = directory.launch(tmp_path)
    directory.run(outside, **directory.DEAD)
    (path / "0-first").symlink_to(outside)
    with pytest.raises(RefusedError, match="link"):
        actions.send(path, "halt", {}, "tester")
    assert not (outside / rundir.HALT).exists()


def test_a_request_is_not_written_through_a_link(tmp_path):
    path, outside = directory.launch(tmp_path), tmp_path / "outside"
    outside.mkdir()
    (path / rundir.REQUESTS).symlink_to(outside)
    with directory.owned(path), pytest.raises(RefusedError, match="link"):
        actions.send(path, "note", {"text": "x"}, "tester")
    assert listing(outside) == []
