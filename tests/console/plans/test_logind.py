"""A logout ends a run or not: systemd-logind answers through a busctl of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.plans.preflight import dangers

ANN = 1000, "ann"
SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
MANAGER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope\n"
SERVICE = "0::/system.slice/slurmd.service/job_7\n"


class Host:
    """A host with systemd on which nothing is killed or removed."""

    def __init__(self, root: Path):
        self.root, self.busctl = root, root / "bin" / "busctl"
        for name in ("run/systemd/system", "proc/self", "bin", "var/lib/systemd/linger"):
            (root / name).mkdir(parents=True)
        self.place(SESSION)
        self.logind()

    def place(self, cgroup: str) -> None:
        (self.root / "proc/self/cgroup").write_text(cgroup)

    def logind(self, kill="false", remove="false", only="as 0", exclude='as 1 "root"') -> None:
        answer = f"b {kill}\nb {remove}\n{only}\n{exclude}\n"
        self.busctl.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}END\n")
        self.busctl.chmod(0o700)

    def linger(self) -> None:
        (self.root / "var/lib/systemd/linger" / ANN[1]).touch()

    def words(self, user: tuple[int, str] = ANN) -> str:
        return " ".join(dangers(self.root, *user) or ())


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return Host(tmp_path)


def test_without_systemd_there_is_nothing_to_say(tmp_path):
    assert dangers(tmp_path, *ANN) is None


def test_a_host_that_neither_kills_nor_removes_is_no_danger(host):
    assert dangers(host.root, *ANN) == ()


def test_a_logind_that_does_not_answer_is_said(host):
    host.busctl.write_text("#!/bin/sh\nexit 1\n")
    assert "does not answer" in host.words()


def test_kill_user_processes_is_named_with_what_to_do(host):
    host.logind(kill="true")
    (said,) = dangers(host.root, *ANN)
    assert said.startswith("logind has KillUserProcesses=yes: the run is killed when ann logs out")
    assert "loginctl enable-linger ann" in said
    assert "systemd-run --user --scope" in said


def test_the_user_manager_stops_at_logout_without_linger(host):
    host.place(MANAGER)
    assert host.words().startswith("the run ends when ann logs out: it belongs to the user manager")
    host.linger()
    assert host.words() == ""


@pytest.mark.parametrize("lists", [{"exclude": 'as 2 "bob" "ann"'}, {"only": 'as 1 "bob"'}])
def test_users_who_are_left_alone_are_not_warned(host, lists):
    host.logind(kill="true", **lists)
    assert host.words() == ""


def test_a_run_of_a_service_is_in_no_session(host):
    host.place(SERVICE)
    host.logind(kill="true")
    assert host.words() == ""


def test_remove_ipc_is_named_unless_the_user_lingers_or_is_of_the_system(host):
    host.logind(remove="true")
    (said,) = dangers(host.root, *ANN)
    assert said.startswith("logind has RemoveIPC=yes: when ann logs out it removes the shared")
    assert "RemoveIPC=no in /etc/systemd/logind.conf" in said
    assert host.words((0, "root")) == ""
    assert host.words((999, "slurm")) == ""
    host.linger()
    assert host.words() == ""
