"""Whether a logout ends a run; a fake busctl answers for systemd-logind."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.plans.preflight import logout_warnings

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
        return " ".join(logout_warnings(self.root, *user) or ())


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return Host(tmp_path)


def test_a_host_without_systemd_or_with_a_harmless_logind_is_no_danger(host, tmp_path):
    assert logout_warnings(tmp_path / "none", *ANN) is None
    assert logout_warnings(host.root, *ANN) == ()
    host.busctl.write_text("#!/bin/sh\nexit 1\n")
    assert "does not answer" in host.words()


def test_kill_user_processes_is_named_with_what_to_do(host):
    host.logind(kill="true")
    text = host.words()
    assert text.startswith("logind has KillUserProcesses=yes and kills the run when ann logs out")
    assert "loginctl enable-linger ann" in text
    assert "systemd-run --user --scope" in text


def test_the_user_manager_stops_at_logout_without_linger(host):
    host.place(MANAGER)
    assert host.words().startswith(
        "the run ends when ann logs out, because it belongs to the user manager"
    )
    host.linger()
    assert host.words() == ""


@pytest.mark.parametrize(
    ("cgroup", "lists"),
    [(SESSION, {"exclude": 'as 2 "bob" "ann"'}), (SESSION, {"only": 'as 1 "bob"'}), (SERVICE, {})],
)
def test_a_run_that_logind_does_not_kill_has_no_warning(host, cgroup, lists):
    host.place(cgroup)
    host.logind(kill="true", **lists)
    assert host.words() == ""


def test_remove_ipc_is_named_unless_the_user_lingers_or_is_of_the_system(host):
    host.logind(remove="true")
    text = host.words()
    assert text.startswith("logind has RemoveIPC=yes and removes the shared memory")
    assert "RemoveIPC=no in /etc/systemd/logind.conf" in text
    assert host.words((0, "root")) == host.words((999, "slurm")) == ""
    host.linger()
    assert host.words() == ""
