"""States of runs as plain data, and functions that drive the app on these states."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from console.model import (
    Alert,
    Figure,
    Gate,
    Gpu,
    LaunchState,
    PendingFlag,
    PhaseState,
    Pulse,
    Rank,
    RunState,
    Verdict,
)
from console.sources.series import Series
from console.tui import background
from console.tui.app import ConsoleApp
from console.tui.feed import ScreenData
from console.tui.operator import Operator
from console.tui.rows import text_of
from console.tui.terminal import Terminal
from console.tui.widgets.alertline import Notice, notices
from console.tui.widgets.header import header_row
from console.tui.widgets.lines import Lines
from tests.launches import HANG_GUARD_S
from trainers.contract.errors import RefusedError

NOW = time.time()
SIZES = [(80, 24), (120, 40)]
HOPS = 6
"""Largest number of message queues that a key passes, with a widget that the key mounts."""
HOSTILE = "\x1b[31m[red]boo[/red] [@click=app.bell]x[/] \x1b]52;c;aGk=\x07 ünï漢字"


def gpu(index: int, **given: Any) -> Gpu:
    held = {"util_pct": 97.0, "power_w": 612.0, "power_limit_w": 700.0, "mem_used_mib": 62464.0,
            "mem_total_mib": 81920.0, "temp_c": 63.0, "sm_mhz": 1700.0}  # fmt: skip
    return Gpu(index, "H200", given.pop("state", "ok"), **(held | given))


def rank(number: int, with_gpu: bool = True, **given: Any) -> Rank:
    pulse = Pulse(given.pop("step", 41_208), given.pop("phase", "forward"),
                  given.pop("since_s", 0.2), 0.0, 918_331, 41_208, "forward", True)  # fmt: skip
    held: dict[str, Any] = {"host": "gpu01", "pid": 48_230 + number, "state": "R", "cpu_pct": 97.0,
                            "rss_mib": 1240.0, "pulse": pulse, "age_s": 0.2,
                            "gpu": gpu(number) if with_gpu else None}  # fmt: skip
    return Rank(number, **(held | given))


def phases(current: int = 1, state: str = "running") -> tuple[PhaseState, ...]:
    names = ("sanity", "plumbing", "recall")
    proves = ("The ranks start.", "Data and loss are connected.", "Attention works.")
    states = ["completed"] * current + [state] + ["next", "later"]
    return tuple(
        PhaseState(i, name, proves[i], states[i], "", "pass" if i < current else "", None, 100,
                   NOW - 60 if i <= current else None, NOW - 30 if i < current else None,
                   f"{i}-{name}" if i <= current else "")
        for i, name in enumerate(names)
    )  # fmt: skip


def launch(state: str = "running", **given: Any) -> LaunchState:
    held: dict[str, Any] = {
        "id": "cpu_smoke-20261120-031500", "path": "/nowhere/cpu_smoke/20261120-031500",
        "plan": "cpu_smoke", "state": state, "why": "", "phase": 1, "phases": phases(),
        "between": "ask", "next_flags": (),
    }  # fmt: skip
    return LaunchState(**(held | given))


def figures() -> dict[str, Figure]:
    values = {"toks_per_s": (41_020.0, "tok/s"), "loss": (2.318, "nats/token"),
              "grad_norm": (0.91, ""), "lr": (2.4e-4, ""), "step_p50_s": (0.8, "s"),
              "step_p99_s": (1.31, "s"),
              "rss_mib": (1240.0, "MiB"), "gate_entropy_mean": (0.931, "nats")}  # fmt: skip
    now = time.time()
    found = {name: Figure(v, unit, "last 10 steps", now) for name, (v, unit) in values.items()}
    return found | {"disk_free_gib": Figure(812.0, "GiB", "newest sample", now)}


def running(count: int = 2, with_gpu: bool = False, **given: Any) -> RunState:
    held: dict[str, Any] = {
        "id": "cpu_smoke-20261120-031500/1-plumbing",
        "path": "/nowhere/cpu_smoke/20261120-031500/1-plumbing", "state": "running", "why": "",
        "since_ts": NOW - 60, "attempt": 1, "host": "gpu01", "world": count, "step": 41,
        "steps_planned": 100, "eta_s": 60.0, "data_age_s": 0.3,
        "ranks": tuple(rank(r, with_gpu) for r in range(count)),
        "gpus": tuple(gpu(i) for i in range(count)) if with_gpu else (),
        "figures": figures(), "launch": launch(),
        "armed": "on stall (10 s): alert, then dump", "armed_short": "dump",
        "environment": {"OMP_NUM_THREADS": "1"},
        "argv": ("torchrun", "-m", "trainers.ddp", "--config", "configs/tiny_cpu.yaml"),
    }  # fmt: skip
    return RunState(**(held | given))


SENTENCE = "rank 3 has not left backward of step 41,207 for 74 s; 7 ranks wait for it"
VERDICT = Verdict(NOW - 5, SENTENCE,
                  "lock", 3, "backward", 41_207, "high",
                  ("rank 3 lags by one step", "GPU 3 is idle, the others spin"))  # fmt: skip


def stalled() -> RunState:
    ranks = [rank(r, since_s=73.0) for r in range(8)]
    ranks[3] = rank(3, step=41_207, phase="backward", since_s=74.0, state="S",
                    gpu=gpu(3, util_pct=0.0, power_w=88.0))  # fmt: skip
    alert = Alert("stall-3", NOW - 5, "crit", "rank 3: no step for 74 s (limit 60 s)", "3")
    return running(8, True, state="stalled", since_ts=NOW - 74, ranks=tuple(ranks),
                   verdict=VERDICT, alerts=(alert,))  # fmt: skip


def lost_gpu() -> RunState:
    ranks = [rank(r) for r in range(8)]
    ranks[5] = rank(5, gpu=Gpu(5, "H200", "lost", why="Xid 79: fallen off the bus"))
    alert = Alert("gpu_lost", NOW - 5, "crit", "GPU 5 is lost: Xid 79")
    return running(8, True, ranks=tuple(ranks), alerts=(alert,))


def waiting() -> RunState:
    flags = (PendingFlag("NSA_LR", "0.001", "op@gpu01", NOW),)
    held = launch("waiting", phases=phases(1, "completed"), next_flags=flags)
    return running(state="completed", since_ts=NOW, data_age_s=None, launch=held, eta_s=None,
                   step=100)  # fmt: skip


def crashed() -> RunState:
    ranks = (
        rank(0, False, exit="killed (SIGSEGV)", state="gone"),
        rank(1, False, exit="exited (code 1), because of another rank"),
    )
    return running(state="crashed", why="rank 0 was killed by SIGSEGV", ranks=ranks,
                   since_ts=NOW, data_age_s=None, eta_s=None,
                   launch=launch("ended", phases=phases(1, "crashed")))  # fmt: skip


def unsupervised() -> RunState:
    return running(
        state="unsupervised", why="the supervisor (pid 7) is not running; ranks 0-1 still run"
    )


def by_hand() -> RunState:
    return running(id="by_hand", state="unsupervised", why="no supervisor", launch=None)


def gates_failed() -> RunState:
    gates = (
        Gate("steps_done", 100.0, "steps", "run", "heartbeat", "≥ 100", "pass"),
        Gate("bytes_right", 0.41, "share", "last record", "heartbeat", "≥ 0.9", "fail"),
    )
    first, second, third = phases(1, "completed")
    ended = launch("ended", phases=(first, replace(second, result="fail"), third))
    return replace(waiting(), gates=gates, launch=ended)


def hostile() -> RunState:
    alert = Alert("x", NOW, "warn", HOSTILE, "")
    return running(id=HOSTILE, why=HOSTILE, host=HOSTILE, alerts=(alert,), armed=HOSTILE,
                   armed_short=HOSTILE, launch=None, argv=(HOSTILE,), checkpoint="step_[b]",
                   ranks=(rank(0, False, exit=HOSTILE),), environment={"A": HOSTILE})  # fmt: skip


STATES: dict[str, Callable[[], RunState]] = {
    "running": running, "eight_gpus": lambda: running(8, True), "stalled": stalled,
    "lost_gpu": lost_gpu, "waiting": waiting, "crashed": crashed, "unsupervised": unsupervised,
    "gates_failed": gates_failed, "hostile": hostile,
}  # fmt: skip


def foreign() -> RunState:
    """Returns the state of a program that records only its loss."""
    loss = replace(figures()["loss"], unit="")
    return running(figures={"loss": loss, "rss_mib": figures()["rss_mib"]})


def measured(state: RunState, second: int) -> dict[str, float]:
    """Returns the values in the charts of a state at this second."""
    values = {"loss": 3.0 - second / 200}
    for each in state.gpus:
        values |= {f"gpu_util_pct:{each.index}": 90.0 + each.index,
                   f"gpu_mem_mib:{each.index}": 62_464.0}  # fmt: skip
    for each in state.ranks:
        values |= {f"rss_mib:{each.rank}": 1240.0, f"cpu_pct:{each.rank}": 97.0}
    if "toks_per_s" in state.figures:
        values |= {"toks_per_s": 41_000.0 + 10 * (second % 7), "step_s": 0.8,
                   "gate_entropy_mean": 0.93, "gate_entropy_lowest": 0.41,
                   "gate_entropy_lowest_layer": 1.0, "gate_entropy:0": 0.95,
                   "gate_entropy:1": 0.41, "gate_entropy:2": 0.97}  # fmt: skip
    return values


class Recorded:
    """A source that returns the states in order, and the last state at each later poll."""

    def __init__(self, *states: RunState, run: Path | None = None):
        self.states = list(states)
        self.run_path = run
        self.is_launch, self.has_all_records = False, True
        self.launch_path, self.summary = None, None
        self.series = Series()
        self.polls = 0
        now = time.time()
        for second in range(120):
            at = now - 120 + second
            self.series.add("", at, measured(states[-1], second))

    def poll(self) -> RunState:
        self.polls += 1
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


class Asked:
    """Replaces `console.tui.background`; stores the requests and launches."""

    def __init__(self, ok: bool = True, text: str = "2 stacks dumped", delay_s: float = 0.0):
        self.prepare = background.prepare
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.launched: list[Any] = []
        self.ok, self.text, self.delay_s = ok, text, delay_s
        self.directory, self.messages = Path("/nowhere/launched"), list[str]()

    def request(self, path: Path, action: str, args: dict[str, Any]) -> str:
        time.sleep(self.delay_s)
        self.sent.append((str(path), action, args))
        if not self.ok:
            raise RefusedError(self.text)
        return self.text

    def launch(self, options: Any) -> tuple[Path, list[str]]:
        self.launched.append(options)
        return self.directory, self.messages


def app_on(
    *states: RunState, run: Path | None = None, actions: Any = None, root: Path | None = None
) -> ConsoleApp:
    """Returns the app on these states; without a state, the app starts without a run."""
    source = Recorded(*states, run=run) if states else None
    actions = actions or Asked()
    path, root = Path("/nowhere") if states else None, root or Path("/nowhere/artifacts")
    app = ConsoleApp(path, "cpu_smoke", root, Terminal())
    app.operator = Operator(app, actions)
    app.feed._open = lambda _: source or Recorded(running())
    return app


@contextlib.asynccontextmanager
async def driven(
    app: ConsoleApp, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[ConsoleApp, Any]]:
    """Runs the app without a terminal; yields the app and its pilot after the first snapshot.

    After each key, the pilot pauses `HOPS` times, so that the app can process the key. One pause
    may be too short on a busy machine.
    """
    async with app.run_test(size=size) as pilot:
        press = pilot.press

        async def press_one_by_one(*keys: str) -> None:
            for key in keys:
                await press(key)
                for _ in range(HOPS):
                    await pilot.pause(0)

        pilot.press = press_one_by_one
        await until(pilot, lambda: app.snapshot is not None)
        await pilot.pause()
        yield app, pilot


async def until(pilot: Any, true: Callable[[], bool], seconds: float = HANG_GUARD_S) -> None:
    """Waits until `true` returns True; if that takes too long, fails with the screen as text."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s:\n{picture(pilot.app)}"
        await pilot.pause(0.02)
    await pilot.pause()


async def see(pilot: Any, *words: str) -> None:
    """Waits until all the words are on the screen."""
    await until(pilot, lambda: all(each in picture(pilot.app) for each in words))


async def play(pilot: Any, *steps: str) -> None:
    """Presses keys; for a step that begins with "…", waits until the rest is on the screen."""
    for step in steps:
        await (see(pilot, step[1:]) if step.startswith("…") else pilot.press(step))


async def renewed(pilot: Any) -> None:
    """Requests a new snapshot for the present view, and waits until the app has it."""
    now = time.monotonic()
    pilot.app.feed.nudge()
    await until(pilot, lambda: pilot.app.snapshot.at > now)


async def charted(pilot: Any) -> str:
    """Returns the screen when it has a curve, and no chart waits for its data."""

    def drawn() -> bool:
        shown = picture(pilot.app)
        return max(shown) > "⠀" and "no data yet" not in shown

    await until(pilot, drawn)
    return await settled(pilot)


async def settled(pilot: Any) -> str:
    """Returns the screen when three readings in a row are equal."""
    shown = [""]
    while len(shown) < 4 or len(set(shown[-3:])) > 1:
        assert len(shown) < 200, f"the screen does not settle:\n{shown[-1]}"
        await pilot.pause(0.04)
        await pilot.pause()
        shown.append(picture(pilot.app))
    return shown[-1]


def lines(app: ConsoleApp) -> list[str]:
    """Returns the rows of the screen as text."""
    strips = app.screen._compositor.render_strips()
    return [re.sub(r"\s+$", "", strip.text) for strip in strips]


def picture(app: ConsoleApp) -> str:
    return "\n".join(lines(app))


VIEWS = {"1": "dashboard", "2": "launch", "3": "stall", "4": "logs"}


async def seen(
    state: RunState,
    size: tuple[int, int] = (80, 24),
    keys: Iterable[str] = (),
    says: Iterable[str] = (),
) -> str:
    """Returns the screen after these keys; waits until the screen matches the patterns `says`."""
    async with driven(app_on(state), size) as (app, pilot):
        await until(pilot, lambda: bool(app.query_one("#header", Lines).shown))
        shown = await settled(pilot)
        for key in keys:
            await pilot.press(key)
            if key in VIEWS:
                await until(pilot, lambda view=VIEWS[key]: app.view_name == view)
                await renewed(pilot)
            shown = await settled(pilot)
        if says:  # while a sample is late, its data are shown as old
            await until(pilot, lambda: all(re.search(each, picture(app)) for each in says))
        return shown


def header_of(state: RunState, width: int = 120, **late: float) -> str:
    return text_of(header_row(ScreenData(0.0, NOW, state), width, **late))


def noticed(state: RunState, **more: float) -> list[Notice]:
    return notices(ScreenData(0.0, NOW, state), **more)
