"""The output of commands: documented names in data, the order of lines, and lost output."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from console import actions, cli
from console.commands import query
from console.commands.output import Changes, OutputError
from console.commands.table import TABLE, WAIT
from console.model import Alert, Figure, RunState
from console.sources.run import RunSource
from console.status_text import number, quoted, status_lines
from tests.console.sources import directory
from tests.console.test_actions import MEMBER
from tests.console.test_cli import ROOT
from tests.console.test_cli import cli as run_cli
from tests.console.tui import recorded
from tests.launches import Started
from trainers.contract import rundir

CONSOLE = f"{shlex.quote(sys.executable)} -m console"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=150,
    )


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    path = directory.launch(tmp_path_factory.mktemp("artifacts"))
    run = directory.run(path / "0-first")
    directory.beat(run, 0, 3, loss=float("inf"))
    log = rundir.rank_log(run, 1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\n")
    return path


# --- standard output that cannot be written ---------------------------------------------------


@pytest.mark.parametrize("words", ["flags", "--help", "logs {}"])
def test_output_that_is_lost_is_exit_code_6_and_one_sentence(launch, words):
    done = shell(f"{CONSOLE} {words.format(launch)} > /dev/full")
    assert done.returncode == OutputError.exit_code
    assert done.stderr.count("cannot write to standard output") == 1
    assert len(done.stderr.splitlines()) == 1


def test_status_prints_the_main_figures_and_names_the_option_for_all_of_them(tmp_path):
    path = directory.launch(tmp_path)
    directory.beat(directory.run(path / "0-first"), 0, 3, loss=2.5, lr=0.001, dt_fetch_s=0.5)
    main, whole = (shell(f"{CONSOLE} status {path}{option}").stdout for option in ("", " --all"))
    assert "\n  loss " in main
    assert "\n  lr " not in main
    assert "\n  lr " in whole
    left = len(whole.splitlines()) - len(main.splitlines()) + 1
    assert f"\n  {left} more figures: status --all\n" in main


def test_status_marks_an_acknowledged_alert_also_if_the_state_says_the_same():
    (alert,) = recorded.stalled().alerts[:1]
    for acknowledged, count in ((False, 1), (True, 2)):
        shown = dataclasses.replace(alert, acknowledged=acknowledged)
        state = dataclasses.replace(
            recorded.stalled(), why=alert.text, alerts=(shown,), verdict=None
        )
        lines = [line for line in status_lines(state) if alert.text in line]
        assert len(lines) == count
        assert any("acknowledged: " in line for line in lines) == acknowledged


def test_status_names_the_command_that_accepts_a_gate(tmp_path):
    failed, launch = recorded.gates_failed(), recorded.launch("ended")
    crashed = dataclasses.replace(failed, launch=launch, state="crashed")
    (line,) = query.resume_lines(crashed, tmp_path)  # an override needs a completed phase
    assert line == f"to start plumbing again, run: nsa-console resume {launch.path}"
    state = dataclasses.replace(failed, launch=launch, state="completed")
    (line,) = query.resume_lines(state, tmp_path)
    assert line.startswith("to accept this result, run: ")
    assert line.endswith(
        f"override {state.launch.path} --phase plumbing --reason TEXT --gate bytes_right"
    )


def test_a_reader_that_leaves_is_no_error_worth_a_word(launch):
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "console", "flags"]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writing)
    assert (done.returncode, done.stderr) == (6, b"")


def test_a_halt_is_sent_also_with_all_standard_descriptors_closed(tmp_path):
    path = directory.launch(tmp_path)
    run = directory.run(path / "0-first", **directory.DEAD)
    assert shell(f"{CONSOLE} halt {path} >&- 2>&- <&-").returncode == 0
    assert (run / rundir.HALT).exists()


def test_a_halt_is_answered_also_if_the_caller_ignores_the_end_of_children(tmp_path):
    """A program inherits an ignored SIGCHLD, and the kernel then reaps its children."""
    path = directory.launch(tmp_path)
    directory.run(path / "0-first", **directory.DEAD)
    done = shell(f"trap '' CHLD; exec {CONSOLE} halt {path}")
    assert (done.returncode, done.stderr) == (0, "")
    assert ".HALT is written" in done.stdout


def test_an_unprintable_character_is_escaped_and_not_an_error(launch):
    done = run_cli(launch.parent, "do", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def tested(tmp_path):
    """A plan of one short phase. The plan sets OMP_NUM_THREADS, which a shell may export."""
    plan = tmp_path / "tested.yaml"
    phase = {"name": "one", "script": str(MEMBER), "args": ["3"]}
    text = {"name": "tested", "env": {"OMP_NUM_THREADS": 1}, "phases": [phase]}
    plan.write_text(yaml.safe_dump(text))
    return plan


def test_a_launch_says_once_what_its_preflight_warns_of_and_its_data_stay_data(tmp_path, tested):
    path = tmp_path / "here"
    try:
        shown = f"NCCL_DEBUG=INFO NSA_LR=0.1 {CONSOLE} launch {tested} --run-dir {path} --json"
        done = shell(shown)
        assert (done.returncode, json.loads(done.stdout)["path"]) == (0, str(path))
        (line,) = [line for line in done.stderr.splitlines() if "NCCL_DEBUG" in line]
        assert line.startswith(
            "nsa-console: warning: shell: handed to the training: NSA_LR; not handed to the "
            "training: NCCL_DEBUG; launch --flag NAME=VALUE"
        )
    finally:
        Started(path).clean()


def test_the_command_after_a_launch_reaches_the_launch_in_any_directory(tmp_path, tested):
    path = tmp_path / os.fsdecode(b"a b'\"$(x)\xff")
    try:
        done = shell(f"{CONSOLE} launch {tested} --run-dir {quoted(str(path))}")
        line = done.stdout.partition("to follow it: ")[2].strip()
        assert shell(line.replace(" watch ", " check ")).returncode in (0, 1), done
    finally:
        Started(path).clean()


def test_a_launch_whose_output_is_lost_still_says_where_it_is(tmp_path, tested):
    path = tmp_path / "here"
    try:
        done = shell(f"{CONSOLE} launch {tested} --run-dir {path} > /dev/full")
        assert (done.returncode, len(done.stderr.splitlines())) == (6, 1)
        assert f"launched here in {path}" in done.stderr
        assert (path / rundir.PLAN_STATE).exists()
    finally:
        Started(path).clean()


def test_a_rejection_whose_answer_is_lost_has_the_exit_code_of_the_rejection(tmp_path, tested):
    path = tmp_path / "here"
    tested.write_text(tested.read_text().replace("'3'", "'100000'"))
    try:
        assert shell(f"{CONSOLE} launch {tested} --run-dir {path}").returncode == 0
        for where in (">/dev/full", "| true"):
            done = shell(f"{CONSOLE} do {path} proceed {where}")
            assert (done.returncode, len(done.stderr.splitlines())) == (4, 1)
            assert "not written: here: " in done.stderr
        assert shell(f"{CONSOLE} do {path} note text=x >/dev/full").returncode == 6
    finally:
        Started(path).clean()


# --- data --------------------------------------------------------------------------------------

ROW = re.compile(r"^\| (`.+`) \| (object|list|lines) \| `(.+)` \|$", re.M)
DOCUMENTED = [
    (command, kind, set(re.sub(r"\[\{.*?\}\]|\[\]", "", names).split()))
    for commands, kind, names in ROW.findall((ROOT / "docs/json.md").read_text())
    for command in re.findall(r"`(.+?)`", commands)
]
PRINTS = {
    "launch PLAN --dry-run": "launch cpu_smoke --dry-run", "check PLAN": "check cpu_smoke",
    "runs": "runs", "status RUN": "status {}", "check RUN": "check {}", "logs RUN": "logs {}",
    "flags": "flags", "plans": "plans", "drill": "drill", "diagnose RUN": "diagnose {}",
    "report RUN": "report {}", "bundle RUN": "bundle {0} --output {0}/bundle.tar.gz",
}  # fmt: skip


@pytest.mark.parametrize("command", PRINTS)
def test_data_is_a_document_a_line_with_the_documented_names(launch, command):
    (kind, names) = next((kind, names) for name, kind, names in DOCUMENTED if name == command)
    done = run_cli(launch.parents[1], *PRINTS[command].format(launch).split(), "--json")
    lines = done.stdout.splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    if kind == "list":
        (records,) = records
    assert len(records) == 1 or kind != "object"
    assert records
    for record in records:
        assert set(record) == names


def test_every_command_with_data_is_in_the_document():
    assert {name.split()[0] for name, _, _ in DOCUMENTED} == {
        "launch", "check", "runs", "status", "watch", "logs", "dump", "halt", "stop", "do",
        "flags", "plans", "adopt", "watchdog", "diagnose", "bundle", "drill", "report", "compare",
        "resume", "override",
    }  # fmt: skip


def test_the_exit_codes_in_the_readme_are_those_of_the_table():
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "README.md").read_text(), re.M)
    found = [(int(code), means) for code, means in rows]
    assert found == [*cli.EXITS.items(), *cli.RUN_EXITS.items()]
    by_run = [row.name for row in TABLE if row.exits_by_run and WAIT not in row.options]
    assert f"({', '.join(by_run)}, --wait)" in cli.OF_A_RUN
    assert f"`{'`, `'.join(by_run)}` and `--wait` also report" in (ROOT / "README.md").read_text()


# --- following --------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--plain"], ["--json"]])
@pytest.mark.parametrize("state", ["ended", "unsupervised"])
def test_watching_ends_with_the_launch_though_its_run_cannot_be_read(tmp_path, words, state):
    path = directory.launch(tmp_path)
    run = directory.run(path / "0-first")
    (run / rundir.SUPERVISOR).write_text("garbage")
    change = {"state": "ended"} if state == "ended" else {"supervisor": directory.DEAD}
    directory.change(path / rundir.PLAN_STATE, **change)
    done = run_cli(tmp_path, "watch", str(path), *words)
    assert done.returncode == (1 if state == "ended" else 5)
    if words == ["--plain"]:
        assert done.stdout.splitlines()[-1].startswith("no go; ")


def test_a_phase_has_ended_before_the_next_one_starts(tmp_path):
    path = directory.launch(tmp_path)
    directory.run(path / "0-first")
    source, changes = RunSource(path), Changes()
    said = list(changes.sentences(source.poll(), 0.0))
    directory.run(path / "1-second", state="starting")
    phases = [
        {"name": "first", "state": "completed", "result": "pass", "dir": "0-first"},
        {"name": "second", "state": "starting", "dir": "1-second"},
    ]
    directory.change(path / rundir.PLAN_STATE, phase=1, phases=phases)
    said = list(changes.sentences(source.poll(), 1.0))
    assert said[0] == "Phase first is completed, no gates."
    assert "1-second is starting" in said[1]


def test_an_alert_is_told_once_and_again_only_after_it_was_no_longer_open():
    """The text of an open alert may change at each poll, for example by its duration."""
    changes, known = Changes(), {"level": "crit", "observed": True}
    silent = [Alert("supervisor-silent", ts, text=f"{ts:g} s", **known) for ts in (21.0, 22.0, 9.0)]
    own = [Alert("stall", ts, "crit", "stalled") for ts in (1.0, 1.0, 5.0)]
    polls = [[silent[0], own[0]], [silent[1], own[1]], [own[2]], [silent[2]]]
    said = [
        list(changes.sentences(RunState("x", "/x", "starting", "", alerts=tuple(open_)), 0.0))[at:]
        for at, open_ in zip((1, 0, 0, 0), polls, strict=True)
    ]
    assert said == [
        ["CRIT: 21 s.", "CRIT: stalled."], [],
        ["CRIT: stalled.", "The alert supervisor-silent is no longer open."],
        ["CRIT: 9 s.", "The alert stall is no longer open."],
    ]  # fmt: skip


@pytest.mark.parametrize(("step", "end"), [(4, " 4, loss 4.069"), (5, " 5; at step 4: loss 4.069")])
def test_a_loss_of_an_earlier_step_has_its_step(step, end):
    figures = {"loss": Figure(4.069, "", "step 4", 1.0), "toks_per_s": Figure(9.0, "", "", 1.0)}
    state = RunState("x", "/x", "running", "", step=step, figures=figures)
    assert list(Changes().sentences(state, 10.0))[-1] == f"step{end}, toks_per_s 9."


# --- halt without a supervisor, and in a directory that cannot be written ----------------------


def test_a_halt_that_finds_no_room_for_a_request_writes_the_file(tmp_path):
    """The mailbox is a file, so no request can be written, as on a full disk."""
    path = directory.launch(tmp_path)
    run = directory.run(path / "0-first")
    for folder in (path, run):
        (folder / rundir.REQUESTS).touch()
        with directory.owned(path):
            assert actions.send(folder, "halt", {}, "tester") == ""
        assert (folder / rundir.HALT).read_text() == "requested by tester\n"
    assert "no supervisor" not in actions.answer(path, "", 1)["text"], "the supervisor is alive"


def test_a_request_into_a_frozen_directory_is_given_up_in_time(frozen):
    run_dir, thaw = frozen
    done = run_cli(run_dir, "halt", str(run_dir), "--timeout", "1")
    thaw()
    assert done.returncode == 5
    assert "does not answer within 1 s: delivery of halt unknown" in done.stderr


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(2923.4, 3, "2,923"), (999.5, 3, "1,000"), (27.78, 3, "27.8"), (9999.7, 4, "10,000"),
     (9999.2, 4, "9999"), (0.000123456, 4, "0.0001235"), (2e15, 4, "2e+15")],
)  # fmt: skip
def test_only_tiny_or_huge_numbers_have_an_exponent(value, digits, text):
    assert number(value, digits) == text
