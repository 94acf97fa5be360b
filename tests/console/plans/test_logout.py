"""The row `logout` of the preflight; a fake busctl answers in place of systemd-logind."""

from __future__ import annotations

import pytest

from console.plans.host_checks import at_logout

SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
MANAGER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope\n"
ENDS = "systemd-logind ends the run when ann logs out; run loginctl enable-linger ann, and launch"
REMOVES = "systemd-logind removes the shared memory of the run when ann logs out; run loginctl"


@pytest.mark.parametrize(
    ("cgroup", "answers", "uid", "lingers", "text"),
    [
        (SESSION, "false false", 1000, False, ""),
        (SESSION, "true false", 1000, False, ENDS),
        (SESSION, "true false", 1000, True, ENDS),
        (MANAGER, "true false", 1000, False, ENDS),
        (MANAGER, "true true", 1000, True, ""),
        (SESSION, "false true", 1000, False, REMOVES),
        (SESSION, "false true", 1000, True, ""),
        (SESSION, "", 1000, False, "not available: systemd-logind does not answer busctl"),
        (SESSION, "false", 1000, False, "not available: systemd-logind does not answer busctl"),
    ],
)
def test_what_a_logout_ends_or_removes_is_named_with_what_to_do(
    tmp_path, monkeypatch, cgroup, answers, uid, lingers, text
):
    assert at_logout(tmp_path, uid, "ann") == (
        "pass",
        "the run survives a logout (no systemd-logind here)",
    )
    for name in ("run/systemd/system", "proc/self", "bin", "var/lib/systemd/linger"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    busctl, lines = tmp_path / "bin/busctl", "".join(f"echo b {each}\n" for each in answers.split())
    busctl.write_text(f"#!/bin/sh\n{lines or 'exit 1'}\n")
    busctl.chmod(0o700)
    if lingers:
        (tmp_path / "var/lib/systemd/linger/ann").touch()
    result, found = at_logout(tmp_path, uid, "ann")
    assert (result, found[: len(text)]) == ("unknown" if text else "pass", text)
