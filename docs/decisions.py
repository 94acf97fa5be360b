"""The table of decisions: the sources that each action, go, verdict and target needs.

`python -m docs.decisions > docs/decisions.md` writes the page. Tests with the mark `decision(name,
case)` prove each row in three cases: one source is wrong, one is missing, all are right.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["act", "go", "verdict", "target"]
CASES = ("lie", "absent", "true")
FACT = "This is a fact, enough by itself."
HEADINGS: dict[Kind, str] = {
    "act": "Actions", "go": "The result go", "verdict": "Verdicts with high confidence",
    "target": "Targets",
}  # fmt: skip
TEXT = """\
# Decisions

Generated from the table in `docs/decisions.py`. A decision needs all of its sources, (a), (b) and
so on, and they must agree. No single faulty writer, file or clock should be able to produce all of
them. An exit that was seen through a pidfd is a fact and needs no second source. The text of a log
alone is never enough. [words.md](words.md) explains the words.
"""
Source = str | tuple[str, ...]
"""One source, or a tuple: a sentence that ends with a colon, then the alternatives."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One row. `sources` are the independent sources, or one fact."""

    name: str
    kind: Kind
    what: str
    sources: tuple[Source, ...]
    absent: str
    disagree: str


TABLE: tuple[Decision, ...] = (
    Decision("end-others", "act", "end the other ranks after one rank has failed",
             ("The end of the failed rank is seen through its pidfd.",
              ("One of these shows that the rank failed:",
               "the exit code or signal that the kernel reports;",
               "the exit record of the rank, if the kernel does not report the exit.")),
             "The supervisor does not end the other ranks. The rule `stall` still watches them.",
             "A line in a log is ignored if no exit confirms it."),
    Decision("stop", "act", "send TERM, and KILL after the grace time, on an operator's request",
             ("The pidfd, the start time and the token of the run identify each process. No other "
              "source is needed.",),
             "A process that cannot be identified gets no signal. A new supervisor does not "
             "continue a stop that only a document of the dead supervisor contains.",
             "A process with another start time or token gets no signal."),
    Decision("end-leftovers", "act", "end a leftover on an operator's request",
             ("The process has the command line of a trainer. None of its ancestors is a "
              "supervisor, and no supervisor has adopted its run.",
              "The token in the environment of the process is also in run.json. The directories of "
              "the run and of the launch belong to this user, and are not writable for all users.",
              "supervisor.json and plan_state.json name a supervisor of this host that is dead, "
              "and the lock is free."),
             "The process gets no signal. A line of the output names the process and the reason.",
             "The process gets no signal. This holds also if a supervisor adopts the run after the "
             "operator has confirmed."),
    Decision("own-directory", "act", "use the contents of the launch directory",
             ("The file at the path of the lock has the device and inode of the open lock.",
              "That file contains the token of the supervisor."),
             "If there is no lock at the path, the supervisor ignores requests and `.HALT` in the "
             "directory, and writes nothing to it. An alert is raised. The ranks still read "
             "`.HALT` while their run directory is at its path. If another error prevents the "
             "check, the last result remains.",
             "The supervisor does the same as without a lock: the directory was moved, replaced "
             "or copied."),
    Decision("restart", "act", "start the next attempt",
             ("The exits of torchrun and of all ranks are seen through pidfds.",
              "The launch directory passes `own-directory`, and run.json contains the token of the "
              "run."),
             "The attempt waits until the directory can be read. An alert is raised.",
             "No attempt starts. While the directory does not pass `own-directory`, the attempt "
             "waits. If run.json contains another token, the run ends, and its reason names the "
             "contradiction."),
    Decision("reject-restart", "act", "end the run although restarts are left",
             ("The exit codes of the attempts are seen through pidfds.",
              ("One of these shows that a restart does not help:",
               "the error in the records of the rank;",
               "the same error in the last two attempts, with no new checkpoint between them.")),
             "If (b) is missing, the next attempt starts, as long as restarts are left. If (a) is "
             "missing and no rank is known to have failed, the run is `lost`, and no attempt "
             "starts.",
             "The next attempt starts, as long as restarts are left."),
    Decision("act-on-stall", "act", "halt, stop or restart a stalled run by a watch rule",
             ("The pulses in the memory that the supervisor opened do not change. After an "
              "adoption, the supervisor must first have seen each pulse change.",
              "The heartbeats contain no new step."),
             "An alert is raised, and the run is neither halted, stopped nor restarted.",
             "The heartbeats show new steps, so the supervisor does the same as for a missing "
             "source."),
    Decision("act-on-figure", "act", "halt, stop or restart a run by a watch rule on its figures",
             ("The figure is severe for long enough. Loss, gradient norm, attention gate and "
              "throughput come from the records of rank 0.",
              ("A second source shows the same condition. The source depends on the figure:",
               "Loss, gradient norm, attention gate: the record of another rank. If no other rank "
               "records the figure: training.csv.",
               "Loss of a run with one rank, if training.csv has no loss: the pulse.",
               "Throughput: the pace of the steps, measured with the clock of this host.",
               "Memory in use and disk of the host: none is needed, because the kernel of this "
               "host measures these figures.")),
             "Only an alert is raised.", "Only an alert is raised."),
    Decision("next-phase", "act", "start the next phase",
             (("The phase completed. Every exit is one of these:",
               "The supervisor saw the exit of the rank with code 0.",
               "The supervisor did not see the exit of the rank, and torchrun exited with code 0.",
               "No supervisor observed the exit, and the exit record says code 0. The pulse at the "
               "same step, or a document of the dead supervisor, confirms the record."),
              "All gates without an override pass. For this, the numbers of the records must have "
              "no gap. If a resumed run had no step left, the gates use the records of the earlier "
              "run. All ranks must then have loaded its last checkpoint."),
             "The launch ends. A gate without its records is unknown, never passed. An exit that "
             "only one record shows is unknown too.",
             "The launch ends, and its reason names the rank or the missing records."),
    Decision("go-run", "go", "print go for a run: `check`, `status` and `--wait` return 0",
             ("In gates.json, which the supervisor writes, every gate passes or has an override.",
              "The command evaluates every gate from the records. Each gate passes, or has the "
              "same override. The command may begin with the sums in snapshot.json; `check --full` "
              "reads all records.",
              "plan.json has the same phases and gates.",
              "plan_state.json has the same phases, and no failed or unknown result."),
             "The result is no go. The output names the document or the missing records.",
             "The result is no go. The output names the gate or the document that differs."),
    Decision("go-plan", "go", "print go for a plan that needs GPUs: its preflight passes",
             ("NVML counts the GPUs, and enough of them are healthy and idle.",
              "The driver of the kernel lists the GPUs, and lists at least as many as NVML."),
             "Without NVML, the check fails. Without the list of the driver, the check is unknown, "
             "which is a warning.",
             "The check fails if NVML counts more GPUs than the driver lists. Fewer GPUs are no "
             "contradiction, because a container or a batch job can hide GPUs."),
    Decision("verdict-stopped", "verdict", "say that a rank is stopped",
             ("The kernel shows the process state T.",
              "The pulse of the rank does not change, and no other rank is slower."),
             "The verdict is not `stopped`.",
             "If the pulse changes, the verdict is not `stopped`. If another rank is slower, the "
             "confidence is at most medium."),
    Decision("verdict-exited", "verdict", "say that the process of a rank exited",
             ("The exit is seen through the pidfd of the process, or the process is a zombie or "
              "no longer exists. " + FACT,),
             "The verdict is not `exited`.",
             "The verdict is not `exited`, because the process is alive."),
    Decision("verdict-exited-early", "verdict", "say that a rank exited before the others",
             ("The exit is seen through the pidfd of the process.",
              "The pulses of the other ranks are at a later step and do not change."),
             "The confidence is at most medium.",
             "The confidence is at most medium. This holds also if a source other than the "
             "positions of the ranks names a rank that runs."),
    Decision("verdict-cause", "verdict", "name the cause of a stall from the collected evidence",
             (("The evidence names the ranks to blame. There are five sources: flight records, "
               "stacks, processes in /proc, GPUs, positions of the ranks. One of these is true:",
               "Two sources name the same rank.",
               "One source names a rank that is stopped, has ended or exits. The pulse of this "
               "rank does not change.",
               "One source names all ranks. No rank can run, and no pulse changes.",
               "The flight records and the stacks name the rank, or the minority of ranks, that "
               "departs from the usual order of calls.",
               "The kernel, the stacks and the flight records show a lost connection."),
              "A rule of the table of causes applies to the first of these ranks. The stack and "
              "the process of the rank must both show the cause. For a cause that one source "
              "proves, for example `stopped`, one of the two is enough."),
             "The confidence is at most medium if only one source names the rank, or if no cause "
             "is found.",
             "The confidence is at most medium, and the sign that names another rank is shown."),
    Decision("target-id", "target", "find the run that an id names",
             ("Exactly one plan.json contains the id. If none does, exactly one contains a longer "
              "id that begins with it. A copy does not count if its launch is below the same root.",
              "The run has recorded the directory in which it was found."),
             "The action is rejected; the operator must name the directory.",
             "The action is rejected, and the message says how the sources differ."),
    Decision("target-latest", "target", "find the run that `latest` names, for an action",
             ("The creation time in plan.json is later than that of all other launches.",
              "No other plan.json has a later modification time. A copy does not count if its "
              "launch is below the same root."),
             "If a creation time is missing or not valid, the time in the name of the directory "
             "replaces it. If the name contains no time, the modification time does.",
             "The action is rejected, and the message names both launches."),
    Decision("target-supervisor", "target", "find the supervisor that accepts a request",
             ("On this host, the process with the recorded pid, start time and boot is alive. "
              "If it is in another PID namespace, only the lock is checked.",
              ("The lock belongs to this supervisor:",
               "on this host: the lock is held and contains the recorded token;",
               "on another host: the lock contains the recorded token, and an answer comes.")),
             "The request is rejected, because there is no supervisor. If the launch has not "
             "ended, the message offers adopt. If no answer comes from another host, the command "
             "says so.",
             "The request is rejected: the directory is a copy, or its launch was moved."),
    Decision("target-process", "target", "find the process that gets a signal",
             ("A pidfd of the process is opened first.",
              "Afterwards, the start time of the process and the token of the run are read. They "
              "equal the recorded values."),
             "The process gets no signal.", "The process gets no signal."),
)  # fmt: skip

DECISIONS: dict[str, Decision] = {row.name: row for row in TABLE}


def as_markdown() -> str:
    """Returns the page of decisions."""
    lines = [TEXT]
    for kind, heading in HEADINGS.items():
        lines += [f"## {heading}", ""]
        for row in TABLE:
            if row.kind == kind:
                lines += _section(row)
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(row: Decision) -> Iterator[str]:
    """Yields the lines of one decision: its sources with letters, and the two other cases."""
    yield f"**`{row.name}`**: {row.what}."
    yield ""
    for letter, source in zip("abcd", row.sources, strict=False):
        first, *alternatives = (source,) if isinstance(source, str) else source
        yield _item(f"({letter}) {first}" if len(row.sources) > 1 else first)
        yield from (_item(each, "  ") for each in alternatives)
    yield _item(f"**A source is missing:** {row.absent}")
    yield _item(f"**Sources disagree:** {row.disagree}")
    yield ""


def _item(text: str, indent: str = "") -> str:
    """Returns an item of a Markdown list, in lines of at most 100 columns."""
    return textwrap.fill(
        text, 100, initial_indent=f"{indent}- ", subsequent_indent=f"{indent}  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
