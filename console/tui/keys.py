"""The one table of keys: bindings, footer, help, palette and documents are drawn from it.

Lower case looks, upper case acts; what acts on a run asks first. A key's work is its question, the
method `do_<id>` of the view that is shown, or else that of the app. The views come first, as in
`VIEWS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from console.model import RunState
from console.tui import confirmations
from console.tui.confirmations import Question

VIEWS = ("dashboard", "launch", "stall", "logs")
LISTS = ("launch", "stall", "logs")


@dataclass(frozen=True, slots=True)
class Key:
    """One thing that can be done. `label` is what the footer says, "" keeps it out of it.

    `weight` decides who stays in a narrow footer; `asks` what the confirmation is about.
    """

    id: str
    keys: tuple[str, ...]
    help: str
    label: str = ""
    weight: int = 0
    views: tuple[str, ...] = VIEWS
    asks: str = ""
    question: Callable[[RunState | None], Question] | None = None
    """The question about the run on the screen, of a key that has no more to do."""

    @property
    def shown(self) -> str:
        """The first of its keys as the footer and the help write it."""
        return NAMES.get(self.keys[0], self.keys[0])


NAMES = {
    "down": "↓", "up": "↑", "left": "←", "right": "→", "escape": "esc", "pageup": "pgup",
    "pagedown": "pgdn", "shift+tab": "shift+tab",
}  # fmt: skip

TABLE: tuple[Key, ...] = (
    Key("dashboard", ("1",), "Dashboard: ranks, figures, charts, newest log lines", "Dash", 9),
    Key("launch_view", ("2",), "Launch: phases, flags now and next, command, checks", "Launch", 9),
    Key("stall_view", ("3",), "Stall: who holds the run up, with the stacks", "Stall", 9),
    Key("logs_view", ("4",), "Logs: of all ranks, follow, find, filter", "Logs", 9),
    Key("dump", ("D",), "Dump the stacks of all ranks", "dump", 8, asks="nothing is lost",
        question=confirmations.dump),
    Key("halt", ("H",), "Halt: all ranks stop at the same step and save", "halt", 8,
        asks="the run ends with a checkpoint", question=confirmations.halt),
    Key("checkpoint", ("C",), "Checkpoint now: all ranks save and go on", asks="nothing is lost",
        question=confirmations.checkpoint),
    Key("kill", ("K",), "Stop or kill the run; asks for its name", asks="type the run's name",
        question=confirmations.kill),
    Key("adopt", ("R",), "Resume watching: a new supervisor where the old one is gone",
        asks="nothing is lost", question=confirmations.adopt),
    Key("launch", ("L",), "Launch the plan, or go on to the next phase", "launch", 5,
        asks="processes are started"),
    Key("flags", ("E",), "Go to the flags of the next phase", "flags", 3),
    Key("acknowledge", ("A",), "Acknowledge the alert in the second line", "ack", 2,
        asks="it stays as a note"),
    Key("next_alert", ("a",), "Show the next of the alerts in the second line"),
    Key("pause", ("p",), "Hold the picture, or let it go; another view lets it go", "pause", 1),
    Key("copy", ("y",), "Copy what is shown: to the clipboard (OSC 52) and to a file", "copy", 1),
    Key("span_less", ("[",), "Charts: a shorter time", "span", 0, views=("dashboard",)),
    Key("span_more", ("]",), "Charts: a longer time", views=("dashboard",)),
    Key("charts", ("c",), "Choose the charts and their order; the settings file keeps them",
        "charts", 1, views=("dashboard",)),
    Key("toggle", ("space",), "Change the flag or choice under the cursor", "change", 4,
        views=("launch",)),
    Key("open", ("enter",), "Launch: give the flag a value. Stall: the whole stack", "open", 2,
        views=("launch", "stall")),
    Key("zoom", ("z",), "Zoom: the selected chart, or all of the phases, command, checks, gates",
        "zoom", 3, views=("dashboard", "launch")),
    Key("find", ("/",), "Find text", "find", 6, views=("logs",)),
    Key("find_next", ("n",), "Next line with that text", views=("logs",)),
    Key("find_previous", ("N",), "Line with that text before", views=("logs",)),
    Key("left", ("left",), "Dashboard: another chart, or the crosshair of the zoomed one. "
        "Stall: more stacks to the left. Logs: another rank", views=("dashboard", "stall", "logs")),
    Key("right", ("right",), "Dashboard: another chart, or the crosshair of the zoomed one. "
        "Stall: more stacks to the right. Logs: another rank",
        views=("dashboard", "stall", "logs")),
    Key("down", ("down", "j"), "Down", views=LISTS),
    Key("up", ("up", "k"), "Up", views=LISTS),
    Key("page_down", ("pagedown",), "A page down", views=LISTS),
    Key("page_up", ("pageup",), "A page up", views=LISTS),
    Key("top", ("g", "home"), "To the top", views=LISTS),
    Key("bottom", ("G", "end"), "To the end; a log follows again", views=LISTS),
    Key("panel", ("tab",), "To the next panel or button"),
    Key("panel_back", ("shift+tab",), "To the panel or button before"),
    Key("back", ("escape",), "Back: close what is open, clear the message"),
    Key("palette", (":", "ctrl+p"), "Do anything by its name", "cmd", 3),
    Key("help", ("?",), "This help", "help", 7),
    Key("leave", ("q", "ctrl+c"), "Leave; the run goes on", "leave", 9),
)  # fmt: skip

KEYS: dict[str, Key] = {key.id: key for key in TABLE}
BOUND = frozenset(name for key in TABLE for name in key.keys)
BUTTONS: tuple[tuple[str, str], ...] = (
    ("dump", "Dump"), ("halt", "Halt"), ("flags", "Flags"), ("launch", "Launch"),
    ("stall_view", "Diagnose"),
)  # fmt: skip
"""The action bar: the id of a key and the words on its button."""


def for_view(view: str) -> tuple[Key, ...]:
    """Returns the keys that do something in a view, in the order of the table."""
    return tuple(key for key in TABLE if view in key.views)
