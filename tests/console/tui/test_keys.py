"""The table of keys: one meaning per view, and bindings, footer and help from the table."""

from __future__ import annotations

import pytest

from console import action_table
from console.tui import keys
from console.tui.app import ConsoleApp
from console.tui.operator import Operator
from console.tui.rows import text_of, width_of
from console.tui.views.dashboard import Dashboard
from console.tui.views.launch import Launch
from console.tui.views.logs import LogView
from console.tui.views.stall import Stall
from console.tui.widgets.bars import footer_row
from console.tui.widgets.keylist import help_rows

CLASSES = {"dashboard": Dashboard, "launch": Launch, "stall": Stall, "logs": LogView}
TAKEN_BY_TERMINALS = {"ctrl+a", "ctrl+b", "ctrl+s", "ctrl+q", "ctrl+z"}


@pytest.mark.parametrize("view", keys.VIEWS)
def test_every_key_of_a_view_means_one_thing_and_does_something_there(view):
    names = [name for key in keys.for_view(view) for name in key.keys]
    assert sorted(names) == sorted(set(names))
    for key in keys.for_view(view):
        places = (CLASSES[view], ConsoleApp, Operator)
        assert key.question or any(hasattr(each, f"do_{key.id}") for each in places), key


def test_bindings_come_from_the_table_and_ctrl_c_only_leaves():
    bound = ConsoleApp._merged_bindings.key_to_bindings
    assert {"1", "D", "K", "ctrl+c", "ctrl+p", "question_mark", "left_square_bracket"} <= set(bound)
    assert not set(bound) & TAKEN_BY_TERMINALS  # the framework's own ctrl+q is not inherited
    assert bound["ctrl+c"][0].action == "quit_now"


def test_every_action_with_a_key_asks_and_upper_case_keys_act():
    """Other upper-case keys only move: E to the flags, N to a line of a log, G to its end."""
    acting = {action.key for action in action_table.TABLE if action.key}
    asking = {key.keys[0] for key in keys.TABLE if key.actions}
    assert acting == asking
    upper = {name for key in keys.TABLE for name in key.keys if name.isupper()}
    assert upper == acting | {"E", "N", "G"}


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("view", keys.VIEWS)
def test_the_footer_fits_and_always_says_how_to_leave(view, width):
    row = footer_row(view, width)
    assert width_of(row) <= width
    assert "q leave" in text_of(row)
    assert "1 Dash" in text_of(row)


@pytest.mark.parametrize("view", keys.VIEWS)
def test_the_help_names_every_key_of_the_view(view):
    text = "\n".join(text_of(row) for row in help_rows(view, 76))
    for key in keys.for_view(view):
        assert key.help.split()[0] in text
        assert key.shown in text
