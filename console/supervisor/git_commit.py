"""The commit of the code that a run starts; a thread reads it because git may take seconds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from console.supervisor import launch_spec
from console.supervisor.alerts import Alerts
from trainers.contract import jsonl

CODE_CHANGED = "code-changed"


class Commit:
    """Owns the commit of the newest attempt; `git` is {} if the commit is not available."""

    def __init__(self, folder: Path, alerts: Alerts, git: Mapping[str, Any]):
        self.git, self._folder, self._alerts = git, folder, alerts
        self._found: deque[tuple[Mapping[str, Any], bool]] = deque()

    def read(self, begins: bool) -> None:
        """Starts git. Without `begins` the attempt was adopted, and it keeps its former commit."""
        folder, found = self._folder, self._found
        threading.Thread(
            target=lambda: found.append((launch_spec.git_facts(folder), begins)), name="git",
            daemon=True,
        ).start()  # fmt: skip

    def poll(self) -> bool:
        """Returns whether git has answered since the last call; raises an alert on a new commit."""
        if not self._found:
            return False
        (git, begins), former = self._found.popleft(), self.git
        if former and git and former != git:
            names = " → ".join(map(_words, (former, git)))
            text = f"the code changed since the last attempt or supervisor: {names}"
            self._alerts.raise_(CODE_CHANGED, text, "warn")
        self.git = dict(git) if git and (begins or not former) else former
        return True


def _words(git: Mapping[str, Any]) -> str:
    changed = " with local changes" if git.get("dirty") else ""
    return f"commit {jsonl.text(git, 'sha')[:12] or '?'}{changed}"
