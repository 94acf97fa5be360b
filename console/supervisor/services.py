"""Services that the parts of a launch share."""

from __future__ import annotations

import select
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.sources.nvml import Nvml
from console.supervisor.directory import Directory
from console.supervisor.hooks import Hooks
from console.supervisor.link import Link


@dataclass(frozen=True, slots=True)
class Services:
    """Services that a launch shares: the run directory's thread, NVML, the main loop, the alert
    hook, the token in the lock file, and the owner of the processes."""

    directory: Directory
    nvml: Nvml
    poller: select.poll
    hooks: Hooks
    lock_token: str
    owner: Link

    def publish(self, path: Path, record: Mapping[str, Any]) -> None:
        """Replaces a document; whoever has to go on with this launch is given it too."""
        self.directory.document(path, record)
        self.owner.keep(path, record)
