"""Valid and wrong words of commands: documented exit codes, errors of one line, and no launch."""

from __future__ import annotations

import argparse
import shlex

import pytest

from console import cli
from tests.console.sources import directory
from trainers.contract import rundir

GARBAGE = (
    "", "-1", "nan", "1e400", "9" * 5000, "x" * 5000, "/" + "a" * 300 + ".yaml", "a\0b", "\x1b[2J",
    "\udcff", "=b", "train.lr=nan", "NSA_LR=1e400", "..", "/dev/zero", "[", "٣",
)  # fmt: skip
RUN = "<run>"
GOOD = {
    "runs": [], "status": [RUN], "watch": [RUN, "--plain"], "watchdog": [RUN, "--halt"],
    "adopt": [RUN], "resume": [RUN, "--dry-run"], "check": [RUN], "compare": [RUN],
    "diagnose": [RUN], "bundle": [RUN, "--output", "/dev/null"],
    "report": [RUN, "--output", "/dev/null"], "logs": [RUN],
    "flags": [], "plans": [], "drill": [],
    "launch": ["cpu_smoke", "--dry-run", "--phase=sanity"], "dump": [RUN], "halt": [RUN],
    "stop": [RUN], "do": [RUN, "note", "text=hello"],
    "override": [RUN, "--phase", "first", "--gate", "loss_falls", "--reason", "why"],
}  # fmt: skip
"""Valid words of each command. The run has ended, so it accepts no request."""


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = cli.build_parser()._actions
    (chosen,) = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
    for parser in chosen.choices.values():
        parser.fill()
    return chosen.choices


@pytest.fixture(scope="module")
def over(tmp_path_factory):
    """A launch that has ended, with one run."""
    launch = directory.launch(tmp_path_factory.mktemp("artifacts"))
    run = directory.run(launch / "0-first", state="halted")
    directory.beat(run, 0, 3, loss=2.5)
    phases = [{"name": "first", "state": "halted", "result": "", "dir": "0-first"}]
    directory.document(
        launch / rundir.PLAN_STATE, {"v": 1, "state": "ended", "phase": 0, "phases": phases}
    )
    return launch


def variants(name: str, parser: argparse.ArgumentParser, run: str):
    """Yields the valid words, then variants with garbage: added, as a word, or as a value."""
    good = [run if word == RUN else word for word in GOOD[name]]
    yield [name, *good]
    for wrong in GARBAGE:
        yield [name, *good, wrong]
        yield ["--root", wrong, name, *good]
        for place, word in enumerate(good):
            if not word.startswith("-"):
                yield [name, *good[:place], wrong, *good[place + 1 :]]
        for action in parser._actions:
            if action.option_strings and action.nargs is None:
                yield [name, *good, action.option_strings[-1], wrong]
                yield [name, *good, f"{action.option_strings[-1]}={wrong}", "--json"]


@pytest.mark.parametrize("name", commands())
def test_any_words_get_one_sentence_and_a_documented_exit_code(name, over, capsys, monkeypatch):
    monkeypatch.chdir(over)
    before = sorted(over.rglob("*"))
    for words in variants(name, commands()[name], str(over)):
        code = cli.main(words)
        out, err = capsys.readouterr()
        shown = [word[:60] for word in words]
        assert code in cli.EXITS, shown
        assert len(err.splitlines()) <= 1, shown
        assert out or err or name == "logs", shown
        assert "\x1b" not in out + err, shown
        assert err.count("Error") == 0, (shown, err)
    assert sorted(over.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("watchdog latest --interval nan", 2, "nan must be above 0"),
        ("runs --limit 0", 2, "at least 1"),
        ("logs {run} --rank 99", 3, "has no rank 99; it has ranks 0 to 1"),
        ("launch cpu_smoke --phase ''", 2, "--phase: '' is empty"),
        ("launch cpu_smoke --flag NSA_LR=1e400", 2, "NSA_LR cannot be '1e400'"),
        ("launch cpu_smoke --set train.lr=nan", 2, "train.lr cannot be 'nan'"),
        ("launch {script} --set train.lr=1", 2, "starts a foreign program"),
        ("launch cpu_smok", 2, "did you mean 'cpu_smoke'"),
        ("launch /nowhere/plan.yaml", 2, "plan"),
        ("launch cpu_smoke --flag NSA_LRR=1", 2, "did you mean 'NSA_LR'"),
        ("launch cpu_smoke --flag NSA_LR", 2, "NAME=VALUE"),
        ("launch cpu_smoke --set train.stepz=3", 2, "did you mean 'train.steps'"),
        ("launch cpu_smoke --set model.n_heads=3", 2, "multiple of n_kv_groups"),
        ("launch cpu_smoke --set data.path=/nowhere", 2, "/nowhere"),
        ("launch cpu_smoke --phase sanitty", 2, "did you mean 'sanity'"),
        ("launch cpu_smoke --nproc 0", 2, "nproc"),
        ("launch cpu_smoke --run-dir /usr", 4, "not empty"),
        ("status nope", 3, "no run 'nope'"),
        ("check cpu_smok", 3, "plans lists the plans"),
        ("status /usr", 3, "--root /usr runs lists the runs in it"),
        ("do {run} fly", 2, "no action 'fly'"),
        ("do {run}", 2, "arguments are required: ACTION; see"),
        ("stop {run} --kill", 2, "--yes"),
        ("override {run}", 2, "arguments are required: --phase, --gate, --reason; see"),
        ("do {run} override", 2, "override needs phase=PHASE: name of the phase"),
        ("do {run} note", 2, "note needs text=TEXT: the sentence"),
        ("logs {run} --grep [", 2, "regular expression"),
        ("", 2, "needs a terminal; use a subcommand"),
        ("watch {run}", 2, "needs a terminal; add --plain"),
        ("check latest --measure", 2, "'latest' is not a plan"),
        ("drill nope", 2, "no drill 'nope'"),
        ("drill stop", 2, "needs a terminal"),
        ("drill stop --plain --rank 2", 2, "--rank 2 --nproc 2"),
        ("drill slow --plain --nproc 1", 2, "--nproc must be 2 to 16"),
        ("fly", 2, "invalid choice: 'fly'"),
        ("launch", 2, "either PLAN or --config"),
        ("launch cpu_smoke --trainer fsdp", 2, "--trainer needs --config"),
        ("launch --config nowhere.yaml", 2, "no config file nowhere.yaml"),
        ("launch --config {script}", 2, "there is no setting 'name'"),
    ],
)
def test_what_is_wrong_is_named(words, code, said, over, tmp_path, capsys):
    script = tmp_path / "p.yaml"
    script.write_text("name: p\nphases: [{name: a, script: p.yaml}]\n")
    given = ["--root", str(tmp_path), *shlex.split(words.format(run=over, script=script))]
    before = sorted((*over.rglob("*"), *tmp_path.rglob("*")))
    assert cli.main(given) == code
    assert sorted((*over.rglob("*"), *tmp_path.rglob("*"))) == before
    out, err = capsys.readouterr()
    assert (said in err, len(err.splitlines()), out) == (True, 1, "")


def test_help_is_a_reference_of_80_columns_whose_examples_are_commands(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], *([name] for name in commands())):
        assert cli.main([*words, "--help"]) == 0
        text = capsys.readouterr().out
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80, max(lines, key=len)
        by_run = not words or commands()[words[0]].get_default("command").exits_by_run
        for code, means in (*cli.EXITS.items(), *(cli.RUN_EXITS.items() if by_run else ())):
            assert f"  {code:<3} {means}" in lines
        examples = [line.strip() for line in lines if line.startswith("  nsa-console ")]
        for example in examples:
            parsed = cli.build_parser().parse_args(shlex.split(example)[1:])
            assert callable(parsed.command)
        assert examples
