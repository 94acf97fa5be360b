"""What a logout does to a run: systemd-logind as files below a root of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.plans.logind import User, dangers

ANN = User(1000, "ann")
SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
MANAGER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope\n"
SERVICE = "0::/system.slice/slurmd.service/job_7\n"
SHIPPED = "[Login]\n#KillUserProcesses=no\n#KillExcludeUsers=root\n#RemoveIPC=yes\n"
MAIN, DROP_INS = "etc/systemd/logind.conf", "etc/systemd/logind.conf.d"


@pytest.fixture
def host(tmp_path):
    """A host with systemd on which nothing is removed; returns its root and what writes files."""
    (tmp_path / "run/systemd/system").mkdir(parents=True)

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    write("proc/self/cgroup", SESSION)
    write("usr/lib/systemd/logind.conf", SHIPPED.replace("RemoveIPC=yes", "RemoveIPC=no"))
    return tmp_path, write


def linger(root: Path, user: User = ANN) -> None:
    folder = root / "var/lib/systemd/linger"
    folder.mkdir(parents=True)
    (folder / user.name).touch()


def words(root: Path, user: User = ANN) -> str:
    return " ".join(dangers(root, user) or ())


def test_without_systemd_there_is_nothing_to_say(tmp_path):
    assert dangers(tmp_path, ANN) is None


def test_a_host_that_neither_kills_nor_removes_is_no_danger(host):
    root, _ = host
    assert dangers(root, ANN) == ()


def test_kill_user_processes_is_named_with_what_to_do(host):
    root, write = host
    write(MAIN, "[Login]\nKillUserProcesses=yes\n")
    (said,) = dangers(root, ANN)
    assert said.startswith("logind has KillUserProcesses=yes: the run is killed when ann logs out")
    assert "loginctl enable-linger ann" in said
    assert "systemd-run --user --scope" in said


def test_lingering_saves_what_is_not_in_the_scope_of_a_session(host):
    root, write = host
    write(MAIN, "[Login]\nKillUserProcesses=yes\n")
    linger(root)
    assert "KillUserProcesses" in words(root)
    (root / "proc/self/cgroup").unlink()
    assert words(root) == ""
    write("proc/self/cgroup", MANAGER)
    assert words(root) == ""


def test_the_user_manager_stops_at_logout_without_linger(host):
    root, write = host
    write("proc/self/cgroup", MANAGER)
    assert words(root).startswith("the run ends when ann logs out: it belongs to the user manager")
    linger(root)
    assert words(root) == ""


@pytest.mark.parametrize(
    "lines", ["KillExcludeUsers=bob ann", "KillOnlyUsers=bob", "KillUserProcesses=0"]
)
def test_users_who_are_left_alone_are_not_warned(host, lines):
    root, write = host
    write(MAIN, f"[Login]\nKillUserProcesses=yes\n{lines}\n")
    assert words(root) == ""


def test_a_run_of_a_service_is_in_no_session(host):
    root, write = host
    write("proc/self/cgroup", SERVICE)
    write(MAIN, "[Login]\nKillUserProcesses=yes\n")
    assert words(root) == ""


def test_remove_ipc_is_named_also_where_it_is_the_default(host):
    root, write = host
    write("proc/self/cgroup", SERVICE)
    write("usr/lib/systemd/logind.conf", SHIPPED)
    (said,) = dangers(root, ANN)
    assert said.startswith("logind has RemoveIPC=yes: when ann logs out it removes the shared")
    assert "RemoveIPC=no in /etc/systemd/logind.conf" in said
    assert words(root, User(0, "root")) == ""
    assert words(root, User(999, "slurm")) == ""
    (root / "usr/lib/systemd/logind.conf").unlink()
    assert "RemoveIPC" in words(root)
    linger(root)
    assert words(root) == ""


@pytest.mark.parametrize(
    ("files", "removes"),
    [
        ({MAIN: "[Login]\nRemoveIPC=yes\n"}, True),
        ({MAIN: "[Other]\nRemoveIPC=yes\n"}, False),
        ({MAIN: "[Login]\nRemoveIPC=yes\nRemoveIPC=no\n"}, False),
        ({MAIN: "[Login]\nRemoveIPC=no\n", f"{DROP_INS}/a.conf": "[Login]\nRemoveIPC=on\n"}, True),
        ({f"{DROP_INS}/a.conf": "[Login]\nRemoveIPC=yes\n",
          "usr/lib/systemd/logind.conf.d/b.conf": "[Login]\nRemoveIPC=no\n"}, False),
        ({f"{DROP_INS}/a.conf": "",
          "usr/lib/systemd/logind.conf.d/a.conf": "[Login]\nRemoveIPC=yes\n"}, False),
        ({MAIN: "[Login]\n", "run/systemd/logind.conf": "[Login]\nRemoveIPC=yes\n"}, False),
        ({MAIN: "[Login]\nRemoveIPC=yes\n",
          "run/systemd/logind.conf.d/z.conf": "[Login]\nRemoveIPC=\n"}, False),
        ({f"{DROP_INS}/a.txt": "[Login]\nRemoveIPC=yes\n"}, False),
    ],
)  # fmt: skip
def test_files_and_drop_ins_count_in_the_order_of_systemd(host, files, removes):
    root, write = host
    write("proc/self/cgroup", SERVICE)
    for name, text in files.items():
        write(name, text)
    assert ("RemoveIPC" in words(root)) is removes


def test_files_that_cannot_be_read_as_text_end_nothing(host):
    root, _ = host
    (root / MAIN).parent.mkdir(parents=True)
    (root / MAIN).write_bytes(b"\xff\x00[Login\n=\n[Login]\nRemoveIPC\nRemoveIPC=\xff\n")
    assert words(root) == ""
