"""A bare Textual program, with which the times of the screen are compared.

It has a header, a text and a footer of Textual, and no data. `r` changes the text, `s`
changes between two pages.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Footer, Header, Static

LINES = "\n".join(f"line {number} of the text" for number in range(15))


class Page(Screen[None]):
    """One page; the action `repaint` changes the first line of the text."""

    def __init__(self, title: str):
        super().__init__()
        self.words, self.odd = title, False

    def compose(self) -> ComposeResult:
        yield Header()
        yield Static(f"{self.words} even\n{LINES}")
        yield Footer()

    def action_repaint(self) -> None:
        self.odd = not self.odd
        text = f"{self.words} {'odd' if self.odd else 'even'}\n{LINES}"
        self.query_one(Static).update(text)


class Bare(App[None]):
    """The program, which has two pages."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("r", "screen.repaint", "Repaint"), ("s", "turn", "Screen"), ("q", "quit", "leave"),
    ]  # fmt: skip

    def get_default_screen(self) -> Page:
        return Page("first")

    def action_turn(self) -> None:
        if len(self.screen_stack) > 1:
            self.pop_screen()
        else:
            self.push_screen(Page("second"))


if __name__ == "__main__":
    Bare().run()
