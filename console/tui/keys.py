"""The table of keys, from which bindings, footer, buttons, help and palette are made.

The keys of actions come from `console.action_table`. Each other key has a row here. A method
`do_<id>` of the view, the app or the operator executes it. A question and the palette have a few
more keys of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from console import action_table
from console.action_table import Action, clause
from console.model import RunState
from console.tui import confirmations
from console.tui.confirmations import Question

VIEWS = ("dashboard", "launch", "stall", "logs")
LISTS = ("launch", "stall", "logs")


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table: the keys of one function.

    The footer shows the `label`, if any; a narrow footer drops the keys with the lowest weights.
    `button` is the label on the action bar, or "". `actions` are the actions that the confirmation
    of the key offers.
    """

    id: str
    keys: tuple[str, ...]
    help: str
    label: str = ""
    weight: int = 0
    views: tuple[str, ...] = VIEWS
    button: str = ""
    actions: tuple[Action, ...] = ()

    @property
    def shown(self) -> str:
        """The name of the row's first key, as the screen shows it."""
        return NAMES.get(self.keys[0], self.keys[0])

    @property
    def full_help(self) -> str:
        """The help; for a key with actions, also what each of its actions keeps or loses."""
        costs = (" ".join(action.cost).partition(" (")[0] for action in self.actions)
        helps = (action.help.rstrip(".") for action in self.actions)
        told = [f"{text} ({cost})" for text, cost in zip(helps, costs, strict=True)]
        return _choice(told) if told else self.help

    @property
    def question(self) -> Callable[[RunState | None], Question] | None:
        """The function that makes the confirmation, or None if the key has its own method."""
        if not self.actions or not self.actions[0].title:
            return None
        return lambda state: confirmations.question(state, *self.actions)


NAMES = {
    "down": "↓", "up": "↑", "left": "←", "right": "→", "escape": "esc", "pageup": "pgup",
    "pagedown": "pgdn", "shift+tab": "shift+tab",
}  # fmt: skip


def _choice(sentences: Iterable[str]) -> str:
    """Returns the sentences as one text that says to choose one of them."""
    first, *others = sentences
    return ". Or ".join((first.rstrip("."), *map(clause, others)))


def _of_actions(key: str) -> Key:
    """Returns the row of a key that asks about one action, or about a choice of several actions."""
    actions = tuple(action for action in action_table.TABLE if action.key == key)
    first = actions[0]
    return Key(
        first.name, (key,), _choice(action.help for action in actions),
        first.name if first.weight else "", first.weight,
        button=first.name.capitalize() if first.button else "", actions=actions,
    )  # fmt: skip


TABLE: tuple[Key, ...] = (
    Key("dashboard", ("1",), "Dashboard: ranks, figures, charts, newest log lines", "Dash", 9),
    Key("launch_view", ("2",), "Launch: phases, flags now and next, command, checks", "Launch", 9),
    Key("stall_view", ("3",), "Stall: the verdict, its evidence, the stack of each rank", "Stall",
        9, button="Diagnose"),
    Key("logs_view", ("4",), "Logs: all logs merged, or one log; follow new lines, find text",
        "Logs", 9),
    *map(_of_actions, action_table.KEYS),
    Key("flags", ("E",), "Go to the flags of the next phase", "flags", 3, button="Flags"),
    Key("choose", ("o",), "Open: choose a run to watch, or a plan to launch", "open", 2),
    Key("next_alert", ("a",), "Show the next alert"),
    Key("pause", ("p",), "Pause or resume the display", "pause", 1),
    Key("copy", ("y",), "Copy the view, in Launch the command, to the clipboard (OSC 52) and to a "
        "file", "copy", 1),
    Key("span_less", ("[",), "Charts: a shorter time span", "span", 0, views=("dashboard",)),
    Key("span_more", ("]",), "Charts: a longer time span", views=("dashboard",)),
    Key("charts", ("c",), "Choose the charts and their order; saved in the settings file",
        "charts", 1, views=("dashboard",)),
    Key("toggle", ("space",), "Change the flag or choice under the cursor", "change", 4,
        views=("launch",)),
    Key("phases", ("v",), "Set flags for the next phase, or for all later phases",
        views=("launch",)),
    Key("open", ("enter",), "Launch: set the flag. Stall: read the whole stack", "details", 2,
        views=("launch", "stall")),
    Key("zoom", ("z",), "Dashboard: zoom the selected chart. Launch: show phases, command, "
        "checks, gates and flags in full, with the help of the flags. Stall: show verdict and "
        "evidence in full", "zoom", 3,
        views=("dashboard", "launch", "stall")),
    Key("find", ("/",), "Find text", "find", 6, views=("logs",)),
    Key("find_next", ("n",), "Next line with the searched text", views=("logs",)),
    Key("find_previous", ("N",), "Previous line with the searched text", views=("logs",)),
    Key("left", ("left",), "Dashboard: previous chart, or crosshair of the zoomed chart. "
        "Stall: stacks to the left. Logs: previous log", views=("dashboard", "stall", "logs")),
    Key("right", ("right",), "Dashboard: next chart, or crosshair of the zoomed chart. "
        "Stall: stacks to the right. Logs: next log", views=("dashboard", "stall", "logs")),
    Key("down", ("down", "j"), "Down", views=LISTS),
    Key("up", ("up", "k"), "Up", views=LISTS),
    Key("page_down", ("pagedown",), "A page down", views=LISTS),
    Key("page_up", ("pageup",), "A page up", views=LISTS),
    Key("top", ("g", "home"), "To the top", views=LISTS),
    Key("bottom", ("G", "end"), "To the end. Logs: follow new lines", views=LISTS),
    Key("panel", ("tab",), "To the next panel or button"),
    Key("panel_back", ("shift+tab",), "To the previous panel or button"),
    Key("redraw", ("ctrl+l",), "Draw the whole screen again"),
    Key("back", ("escape",), "Close the overlay, clear the message"),
    Key("palette", (":", "ctrl+p"), "Find a key by its description and press it", "keys", 3),
    Key("help", ("?",), "Help: the keys of this view", "help", 7),
    Key("leave", ("q", "ctrl+c"), "Leave; the run continues", "leave", 9),
)  # fmt: skip

KEYS: dict[str, Key] = {key.id: key for key in TABLE}
BOUND = frozenset(name for key in TABLE for name in key.keys)
BUTTONS: tuple[tuple[str, str], ...] = tuple(
    (key.id, key.button)
    for key in sorted(TABLE, key=lambda key: key.id.endswith("_view"))
    if key.button
)
"""The id and the label of each button of the action bar; buttons that show a view are last."""


def for_view(view: str) -> tuple[Key, ...]:
    """Returns the keys that have a function in a view, in the order of the table."""
    return tuple(key for key in TABLE if view in key.views)
