"""The faults of `make drills`: their true causes and the places where they are injected.

Each text has the name of a fault and a word for each case. The name is a mechanism and its place: a
phase, or `early` or `late` for start-up. The word `2:0` is rank 0 of 2, and `2:all` is every rank
of 2. A word ends with `-` if the program joins with three lines and reports no phases.
"""

from __future__ import annotations

from dataclasses import dataclass

CAUSES = (
    "stopped", "traced", "frozen", "exited", "disk", "loader", "child", "lock", "pipe", "network",
    "busy", "native", "mismatch", "sleep", "transport", "startup",
)  # fmt: skip
AUTHORS = (1, 2)


@dataclass(frozen=True, slots=True)
class Fault:
    """One mechanism at one place. Author 2 did not know the rules of the diagnosis."""

    name: str
    cause: str
    placed: str
    author: int = 1

    @property
    def phase(self) -> str:
        return self.name.rpartition("-")[2]

    @property
    def mechanism(self) -> str:
        return self.name.rpartition("-")[0]


FIRST: dict[str, tuple[str, ...]] = {
    "stopped": (
        "stop-forward 2:1 4:0 2:0-", "stop-backward 4:3 2:0", "stop-save 2:1 4:3-", "stop-log 4:0",
    ),
    "traced": (
        "trace-forward 2:0 2:1-", "trace-optimizer 4:3", "trace-log 2:1 4:0-", "trace-save 4:0",
    ),
    "frozen": (
        "freeze-optimizer 2:1 4:0 2:0-", "freeze-forward 4:3", "freeze-log 2:0",
        "freeze-save 4:0-",
    ),
    "exited": (
        "exit-fetch 2:1 4:0- 2:0", "kill-forward 2:0 4:3 2:1-", "segv-optimizer 2:1 4:0",
        "kill-log 4:0-", "exit-save 4:3",
    ),
    "disk": (
        "disk-save 2:0 2:1- 4:3", "disk-log 2:1 4:0-", "fuse-forward 2:1 2:0-", "fuse-save 4:0",
        "fuse-fetch 2:1",
    ),
    "loader": (
        "worker_stopped-fetch 2:0 4:3- 4:0", "worker_asleep-fetch 2:1 2:0- 4:3",
        "worker_busy-fetch 4:0 2:1-", "pool-fetch 2:1 4:0-", "thread_asleep-fetch 2:0 2:1- 4:3",
        "thread_died-fetch 2:1 4:0",
    ),
    "child": (
        "child-log 2:0 4:3- 4:0", "output-save 2:1 4:3", "paused-save 2:0 2:1-",
        "child-forward 2:1", "output-optimizer 4:0-",
    ),
    "lock": (
        "lock-forward 2:0 4:3-", "deadlock-save 2:1 4:0", "event-optimizer 2:0 2:1- 4:3",
        "future-log 4:3 2:0-", "flock-save 2:0 2:1-", "fcntl-log 2:1 4:0-", "lock-log 4:0",
        "deadlock-backward 2:0", "event-save 4:3-",
    ),
    "pipe": (
        "fifo-log 2:1 2:0- 4:3", "mute-fetch 4:3", "full-log 2:0 2:1- 4:0", "mute-save 2:0",
        "fifo-save 4:0-", "full-forward 2:1",
    ),
    "network": (
        "recv-fetch 2:1 2:0- 4:3", "http-log 2:0 4:0-", "send-save 4:3- 2:1", "recv-log 4:0",
        "http-save 2:0-",
    ),
    "busy": (
        "count-forward 2:1 2:0- 4:0", "count-backward 4:3 2:1", "count-log 2:0 4:0-",
        "count-save 4:3", "iterate-optimizer 2:1 2:1- 4:0", "iterate-fetch 2:0",
    ),
    "native": (
        "mutex-forward 2:0 4:3- 2:1-", "power-backward 2:1 4:0", "mutex-optimizer 2:1- 4:3",
        "regex-fetch 2:1 4:0-", "mutex-log 2:0", "regex-save 4:3",
    ),
    "mismatch": (
        "skip-log 2:1 4:0 2:0- 4:3-", "extra-optimizer 2:0 4:3 2:1- 4:0", "swap-log 2:1 4:3 4:0-",
        "nosync-backward 2:0 4:3 2:1- 4:0", "empty-log 2:1 4:0- 4:3",
    ),
    "sleep": (
        "sleep-fetch 2:0 4:3 2:1- 4:0-", "sleep-forward 2:1 4:0 2:0-",
        "sleep-backward 2:1 4:3- 4:0", "sleep-optimizer 2:0 4:3 2:1-", "sleep-log 2:0 2:1- 4:3",
        "sleep-save 2:0 4:3", "poll-save 2:1 2:0-", "poll-fetch 4:0-", "poll-forward 4:3",
    ),
    "transport": (
        "filter-backward 2:all 4:all 2:all-", "filter-log 2:1 4:all 2:all-",
    ),
    "startup": (
        "sleep-early 2:1 2:0- 4:3", "sleep-late 2:0 4:3- 4:0",
    ),
}  # fmt: skip
SECOND: dict[str, tuple[str, ...]] = {
    "stopped": (
        "here-forward 2:0 4:2-", "watch-optimizer 2:1 2:0-", "suspend-forward 2:all 4:all-",
        "group-fetch 2:1 4:0-",
    ),
    "traced": (
        "seize-forward 2:1 4:2-", "inspect-optimizer 4:1 2:0-", "calls-log 2:1 4:3-",
        "leader-backward 4:2 2:1-",
    ),
    "frozen": (
        "older-forward 2:0 4:3-", "nested-backward 2:1 2:0-", "tree-fetch 2:0 4:1-",
    ),
    "exited": (
        "quit-forward 2:1 4:2-", "finish-log 2:0", "abort-backward 4:3 2:1-",
        "shrunk-fetch 2:0 4:2", "exceed-forward 2:1", "parse-fetch 4:0 2:0-",
        "cache-optimizer 2:1 4:3-",
    ),
    "disk": (
        "commit-save 2:1 4:0-", "journal-log 2:0 4:2-", "pages-optimizer 4:1 2:1",
        "list-fetch 2:0 4:3-", "tokenizer-forward 2:1", "tokenizer-save 4:2-",
        "shard-fetch 4:0 2:1-",
    ),
    "loader": (
        "reader-fetch 2:1", "crew-fetch 4:2", "guarded-fetch 2:0 4:3-", "remote-fetch 2:1",
        "ring-fetch 4:0 2:1", "pooled-fetch 2:0 4:2-", "streamed-fetch 2:1",
        "epoch-fetch 4:1 2:0-",
    ),
    "child": (
        "names-save 2:1", "snapshot-save 4:2", "mirror-save 2:0", "mirror-log 4:3-",
        "squeeze-log 2:1 4:1", "aside-save 2:0 2:1-", "key-log 4:2", "publish-save 2:1 4:0-",
    ),
    "lock": (
        "turn-forward 2:0", "meet-optimizer 4:1", "slots-save 2:0", "record-log 2:1 4:0",
        "schedule-optimizer 4:3", "ledger-log 2:0", "dataset-log 2:1", "dataset-save 4:0-",
        "region-save 2:1 4:3", "saver-save 4:2", "metrics-log 2:1", "table-optimizer 2:0",
    ),
    "pipe": (
        "spool-log 2:0 4:3-", "collector-log 2:1 4:1", "print-log 4:0 2:1-",
        "shapes-forward 2:1 4:2-", "token-optimizer 4:3 2:0-", "parcel-save 2:1 4:0",
    ),
    "network": (
        "resolve-log 2:0 4:2-", "trickle-fetch 2:1", "register-save 4:3 2:0-",
        "again-save 2:0 4:1-", "greet-save 4:2 2:1", "tracker-log 2:0", "feed-log 2:1 4:0",
    ),
    "busy": (
        "merge-fetch 4:0 2:1-", "pack-log 2:1 4:3-", "draw-forward 4:2 2:0-",
        "handoff-optimizer 2:0 4:2-",
    ),
    "native": (
        "spectrum-optimizer 2:1 4:2-", "seal-save 2:0 4:3", "drop-fetch 4:1 2:0-",
        "kernel-forward 2:1 4:0-", "beside-log 2:0 2:1-",
    ),
    "mismatch": (
        "announce-optimizer 2:1", "announce-save 4:0", "takeover-forward 2:0", "handover-log 4:3",
        "notes-save 2:1", "uneven-fetch 2:0 4:2", "collect-log 4:2", "average-log 4:1",
        "check-log 2:1", "lengths-log 4:2 2:0", "turns-log 4:3-", "unused-backward 2:1",
        "twice-backward 2:0 4:1",
    ),
    "sleep": (
        "manifest-fetch 2:0 4:2-", "manifest-save 4:1", "settle-forward 2:1 2:0-",
        "cool-optimizer 4:3 2:1-", "pace-log 2:1 4:0-", "tokens-fetch 2:1", "tokens-log 4:1-",
    ),
    "transport": (
        "small-forward 2:1 2:all-", "worn-log 2:0 4:all", "nearby-backward 2:1 4:all-",
        "share-log 2:1 4:2-",
    ),
    "startup": (
        "port-early 2:1 4:0-", "settings-late 2:0 4:2", "index-early 4:3 2:1-",
        "weights-late 2:1 4:0-", "once-early 2:0 4:2", "more-late 2:1 4:3",
    ),
}  # fmt: skip


def _faults(table: dict[str, tuple[str, ...]], author: int) -> list[Fault]:
    rows = [(cause, row.split(maxsplit=1)) for cause, rows in table.items() for row in rows]
    return [Fault(name, cause, placed, author) for cause, (name, placed) in rows]


FAULTS = (*_faults(FIRST, 1), *_faults(SECOND, 2))
