"""The table of decisions: the sources that each action, GO, high verdict and target needs.

Two sources are independent when no single faulty writer, file or clock produces both. An exit that
was seen through a pidfd is a fact and needs no second source. Text from a log is never a source.
Where a source is missing, or two disagree, there is no action and an alert names the source.

`python -m docs.decisions` prints the table in decisions.md. Three tests prove each row, marked
`decision(name, case)`: one source is wrong, one is missing, both are right.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

Kind = Literal["act", "go", "verdict", "target"]
CASES = ("lie", "absent", "true")
FACT = "a fact, enough by itself"


@dataclass(frozen=True, slots=True)
class Decision:
    """One row. `sources` are the independent sources, or one fact."""

    name: str
    kind: Kind
    what: str
    sources: tuple[str, ...]
    absent: str
    disagree: str


TABLE: tuple[Decision, ...] = (
    Decision("end-others", "act", "end the other ranks after one has failed",
             ("exit of the failed rank with a code or signal, seen through its pidfd: " + FACT,),
             "no action; the stall rule still watches the other ranks",
             "a log line that no exit confirms is ignored"),
    Decision("stop", "act", "TERM, then KILL after the grace time, on an operator's request",
             ("identity of each process: pidfd, start time and the run's token, nothing else",),
             "a process that cannot be identified gets no signal; a stop that only a document of a "
             "former supervisor requests is not continued",
             "a process with another start time or token gets no signal"),
    Decision("end-leftovers", "act", "end a trainer that a dead supervisor left behind, on request",
             ("the command line of a trainer, and no ancestor that is a supervisor",
              "the token in its environment and in run.json, in a directory that is ours",
              "the dead supervisor in supervisor.json and plan_state.json, and a free lock"),
             "no signal; the row of the process says what is missing",
             "no signal, also if a supervisor adopts the run after the confirmation"),
    Decision("own-directory", "act", "act on the contents of the launch directory",
             ("device and inode of the lock's descriptor, compared with the path",
              "the token in the lock file at the path"),
             "requests and .HALT in it are ignored, nothing is written to it; alert",
             "as when it is missing: the directory was moved, replaced or copied"),
    Decision("restart", "act", "start the next attempt",
             ("exits of torchrun and of all ranks, seen through pidfds: " + FACT,
              "the run directory is ours and its run.json has this run's token"),
             "the attempt waits until the directory is readable; alert",
             "no restart: the run ends and reports why"),
    Decision("refuse-restart", "act", "end the run although attempts are left",
             ("exit codes of the attempts, seen through pidfds",
              "the error in the rank's own records, or the same error in two attempts"),
             "a first restart is not rejected",
             "a first restart is not rejected"),
    Decision("act-on-stall", "act", "halt, stop or restart a stalled run by rule",
             ("pulses that do not change, in memory that the supervisor opened; after an adoption "
              "it has seen each of them change",
              "heartbeat records without a new step"),
             "alert only",
             "alert only: records with new steps are progress"),
    Decision("act-on-figure", "act", "halt, stop or restart a run by a rule on its figures",
             ("the figure in rank 0's records",
              "another rank's records; in a run of one rank its training.csv or its pulse; for the "
              "throughput the pace of the pulses by this host's clock"),
             "alert only",
             "alert only"),
    Decision("next-phase", "act", "start the next phase",
             ("exit code 0 of torchrun and of all ranks, seen through pidfds; for an exit that no "
              "supervisor observed the exit record and, at its step, the pulse or a former "
              "supervisor's document",
              "gates that pass over numbered records without a gap"),
             "the plan ends: a gate without its records, or an exit that only a record shows, is "
             "unknown, never passed",
             "the plan ends and names the rank or the missing records"),
    Decision("go-run", "go", "GO for a run: `check`, `status` and `--wait` return 0",
             ("the supervisor's gates.json", "the records of the run, summed by this reader "
              "(snapshot.json has the sums up to a position in each file; `check --full` reads "
              "all)",
              "phases and gates in plan.json", "phases and results in plan_state.json"),
             "no go, with the document or the missing records",
             "no go, with the gate or the document that differs"),
    Decision("go-plan", "go", "GO for a plan that needs GPUs: its preflight passes",
             ("GPUs that NVML counts", "GPUs that the kernel's driver lists"),
             "without NVML the check fails; without the kernel's list it is unknown, a warning",
             "the check fails; a lower count by NVML is a container or a batch job and no "
             "disagreement"),
    Decision("verdict-stopped", "verdict", "high: a rank is stopped",
             ("process state T or t from the kernel",
              "its pulse does not change, and no rank is slower"),
             "no verdict `stopped`", "no verdict `stopped`"),
    Decision("verdict-exited", "verdict", "high: the process of a rank exited",
             ("its exit, seen through its pidfd or as a zombie: " + FACT,),
             "no verdict `exited`", "no verdict `exited`: the process is alive"),
    Decision("verdict-exited-early", "verdict", "high: a rank exited before the others",
             ("its exit, seen through its pidfd",
              "the pulses of the others do not change, at a later step"),
             "medium at most", "medium at most"),
    Decision("verdict-cause", "verdict", "high: the cause of a stall, by collected evidence",
             ("two of: flight records, stacks, processes in /proc and pulses name the same rank; "
              "stacks or records of all others that wait name a rank that the kernel keeps from "
              "answering; a rank that leaves the usual order of calls, or a minority that does, is "
              "named by records and stacks; a lost connection by the kernel, stacks and records",
              "a rule of the table of causes applies to that rank, by its stack and its process, "
              "or by one of them where that is certain"),
             "medium at most: one source alone, or no cause",
             "medium at most, and the sign that names another rank is shown"),
    Decision("target-id", "target", "the run that a name means",
             ("the id in plan.json, of one launch only", "the directory in the run's own records"),
             "the directory has to be given", "rejected, with both directories"),
    Decision("target-latest", "target", "the run that `latest` means, for an action",
             ("creation time in plan.json", "time of the plan file on disk"),
             "the newest by the times that exist; an action is rejected without both",
             "an action is rejected, with both candidates"),
    Decision("target-supervisor", "target", "the supervisor that accepts a request",
             ("a living process of that pid, start time and boot",
              "a held lock with the same token (another host: the token and an answer)"),
             "rejected: no supervisor; adopt is offered (another host: no answer is reported)",
             "rejected: the directory is a copy, or its launch was moved away"),
    Decision("target-process", "target", "the process that gets a signal",
             ("a pidfd that was opened first", "start time and the run's token, read afterwards"),
             "no signal", "no signal"),
)  # fmt: skip

DECISIONS: dict[str, Decision] = {row.name: row for row in TABLE}


def as_markdown() -> str:
    """Returns the table for the documents."""
    lines = ["| decision | what | needs | a source is missing | sources disagree |",
             "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in TABLE:
        needs = "; and ".join(row.sources)
        lines.append(f"| `{row.name}` | {row.what} | {needs} | {row.absent} | {row.disagree} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
