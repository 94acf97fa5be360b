"""The settings file: strict, private, and the only file in which an operator can name hooks."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console import actions, settings_file
from console.settings_file import Settings
from console.supervisor import launch_spec
from tests.console.test_actions import options, plan
from trainers.contract import rundir
from trainers.contract.errors import UsageError


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """The path of the settings file of a test; it does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = settings_file.path()
    path.parent.mkdir(parents=True, mode=0o700)
    return path


def write(file: Path, text: str, mode: int = 0o600) -> None:
    file.write_text(text)
    file.chmod(mode)


def test_without_a_file_there_is_no_hook(file):
    assert file.parent.name == "nsa-console"
    assert settings_file.load() == Settings((), 30.0, ("crit",))


def test_the_file_is_below_the_home_where_xdg_says_nothing_usable(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for said in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CONFIG_HOME", said)
        assert settings_file.path() == tmp_path / ".config" / "nsa-console" / "settings.yaml"


def test_without_a_home_the_error_says_which_variable_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # a uid that no table of users has
    with pytest.raises(UsageError, match="set HOME or XDG_CONFIG_HOME"):
        settings_file.load()


def test_a_folder_that_cannot_be_read_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", f"/{'x' * 300}")
    with pytest.raises(UsageError, match="File name too long; set HOME or XDG_CONFIG_HOME to a"):
        settings_file.load()


def test_a_link_whose_target_is_missing_is_an_error(file):
    """If the disk of this file is not mounted, a run must not start without its hook."""
    file.symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"cannot read .*settings\.yaml: No such file"):
        settings_file.load()


def test_a_hook_is_words_with_their_rate_and_levels(file):
    write(file, 'hook: [notify, "a; b", "$(c)"]\nhook_every_s: 5\nhook_levels: [warn, crit]\n')
    assert settings_file.load() == Settings(("notify", "a; b", "$(c)"), 5.0, ("warn", "crit"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hok: [x]", "did you mean 'hook'"),
        ("hook: notify-send alarm", "list of words"),
        ("hook: [mail, -s, no]", "quote no, off, null, dates and braces"),
        ('hook: ["a\\0b"]', "control character"),
        ("hook: [./here]", "absolute path"),
        ("hook: [~/bin/x]", "absolute path"),
        ("hook: ['']", "absolute path"),
        ("hook_every_s: 0", "1 to 86400 seconds"),
        ("hook_every_s: .nan", "1 to 86400 seconds"),
        ("alive: [./ping]", "'alive' starts with './ping'"),
        ("alive_every_s: 0.5", "1 to 86400 seconds"),
        ("hook_levels: [loud]", "info, warn, crit"),
        ("hook_levels: []", "info, warn, crit"),
        ("[1]", "must be key: value"),
    ],
)
def test_a_wrong_value_is_refused_with_the_file_and_the_right_form(file, text, error):
    write(file, text)
    with pytest.raises(UsageError, match=error) as refused:
        settings_file.load()
    assert str(file) in str(refused.value)


@given(
    st.dictionaries(
        st.sampled_from([*settings_file.KEYS, "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
            lambda x: st.lists(x, max_size=4),
        ),
    )
)
def test_any_document_is_a_hook_or_refused(document):
    try:
        hook = settings_file.parse(document, "x")
    except UsageError:
        return
    assert settings_file.parse(json.loads(json.dumps(asdict(hook))), "x") == hook


@pytest.mark.parametrize(("mode", "folder"), [(0o620, 0o700), (0o602, 0o700), (0o600, 0o777)])
def test_a_file_or_folder_that_others_can_write_names_no_program(file, mode, folder):
    write(file, "hook: [x]", mode)
    file.parent.chmod(folder)
    with pytest.raises(UsageError, match="other users can write"):
        settings_file.load()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")
def test_a_file_of_another_user_names_no_program(file):
    write(file, "hook: [x]")
    os.chown(file, 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user id 12345"):
        settings_file.load()


def test_a_launch_stores_the_hook_and_shows_it_before(file, tmp_path):
    write(file, 'hook: [sh, "; x"]\nhook_every_s: 60\nalive: [touch, x]')
    prepared = actions.prepare(options(tmp_path))
    (row,) = [check for check in prepared.checks if check.name == "hook"]
    assert (row.result, row.text) == (
        "pass",
        "on crit alerts, at most every 60 s: sh '; x'; alive, every 60 s: touch x",
    )
    assert row.text in "\n".join(prepared.lines())
    assert prepared.as_dict()["hook"]["hook"] == ("sh", "; x")
    rundir.write_json(tmp_path / rundir.PLAN, prepared.spec.as_dict(1.0))
    assert (
        launch_spec.load(tmp_path).operator
        == prepared.spec.operator
        == Settings(("sh", "; x"), 60.0, alive=("touch", "x"))
    )


def test_a_hook_that_cannot_run_is_a_warning_and_does_not_refuse_the_launch(file, tmp_path):
    write(file, "hook: [no-such-program-at-all]")
    prepared = actions.prepare(options(tmp_path))
    (row,) = [check for check in prepared.checks if check.name == "hook"]
    assert row.result == "unknown"
    assert "cannot run no-such-program-at-all: there is no such program" in row.text
    assert prepared.ok


@pytest.mark.parametrize("key", settings_file.KEYS)
def test_a_plan_cannot_name_a_hook(file, tmp_path, key):
    chosen = actions.LaunchOptions(plan=plan(tmp_path, **{key: ["sh"]}), root=tmp_path)
    with pytest.raises(UsageError, match=f"there is no key '{key}'"):
        actions.prepare(chosen)
