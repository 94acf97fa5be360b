"""The overlays that ask the operator: the confirmation of an action, and a field for one value."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Button, Input

from console.tui.confirmations import Choice, Question
from console.tui.rows import Row, fill, labelled, rule, wrap
from console.tui.widgets.lines import Box, Lines, Wrapped
from console.tui.widgets.overlay import MOST_SHARE, FlatButton, Overlay
from trainers.contract.errors import UsageError

LABEL = 11
LEAST_WIDTH, MOST_WIDTH = 30, 110
TOO_SMALL = "terminal too small for this question: only No works; enlarge the terminal"


def question_rows(question: Question, width: int) -> list[Row]:
    """Returns the title and the facts of a question, wrapped."""
    *lines, last = wrap(f"── {question.title}", width)
    head = *(((line, ""),) for line in lines), rule(last, width)
    rows: list[Row] = [tuple((text, "warn") for text, _ in row) for row in head]
    for label, text in question.facts:
        lines = wrap(text, min(MOST_WIDTH, width) - LABEL - 3) or [""]
        rows += labelled((f"  {fill(label, LABEL)} ", "dim"), lines)
    return rows


class Confirm(Overlay):
    """Asks a question; calls `then` with the choice, but not for the default No or for Escape.

    The facts of an open question do not change. While the terminal is too small to show all facts,
    no choice works.
    """

    DEFAULT_CSS = """
    Confirm Input { padding: 0 2; }
    Confirm #hint { width: 1fr; }
    """
    BINDINGS = [  # noqa: RUF012 - the framework's own type
        Binding("n,N", "no", show=False),
        Binding("y,Y", "yes", show=False),
    ]

    def __init__(self, question: Question, then: Callable[[Choice], object]):
        super().__init__(id="confirm")
        self.question, self._then = question, then
        self._is_readable = False

    def _rows(self, width: int) -> list[Row]:
        """Returns the title and the facts, or a sentence if the terminal is too small for them."""
        rows = question_rows(self.question, width)
        room = MOST_SHARE * self.app.size.height // 100 - 3 - bool(self.question.typed)
        self._is_readable = width >= LEAST_WIDTH and len(rows) <= room
        self.query("#hint").set(display=self._is_readable)
        return rows if self._is_readable else [((line, "warn"),) for line in wrap(TOO_SMALL, width)]

    def compose(self) -> ComposeResult:
        yield Wrapped("facts", self._rows)
        if self.question.typed:
            yield Input(placeholder=f"type {self.question.typed} to continue", compact=True)
        with Box(classes="buttons"):
            yield FlatButton("No", "no")
            for index, choice in enumerate(self.question.choices):
                button = FlatButton(choice.word, f"choice{index}", choice)
                button.disabled = bool(self.question.typed)
                yield button
            yield Lines(id="hint")

    def on_mount(self) -> None:
        self._hint("" if self.question.typed else "  y yes   n no   ← → enter")
        self.query_one("#facts", Wrapped).fit()  # hides the hint if the terminal is too small
        self.query_one(Input if self.question.typed else "#no").focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        allowed = event.value.strip() == self.question.typed
        for button in self.query(FlatButton):
            button.disabled = button.means is not None and not allowed
        self._hint("")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip() != self.question.typed:
            self._hint(f"  that is not {self.question.typed}", "warn")
            return
        self.query_one("#no").focus()
        self._hint("  → chooses a button, enter presses it")

    def _hint(self, words: str, style: str = "dim") -> None:
        self.query_one("#hint", Lines).show([((words, style),)])

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        if isinstance(event.button, FlatButton):
            self._decide(event.button.means)

    def _decide(self, choice: Choice | None) -> None:
        if not self.display or not (choice is None or self._is_readable):
            return  # the key was pressed twice, or not all facts are shown
        self.close()
        if choice is not None:
            self._then(choice)

    action_no = Overlay.close

    def action_yes(self) -> None:
        if not self.question.typed and len(self.question.choices) == 1:
            self._decide(self.question.choices[0])


class Editor(Overlay):
    """Edits one value; calls `then` with the text. `check` raises UsageError for an invalid text.

    The error is shown while the operator types.
    """

    def __init__(
        self, title: str, value: str, hint: str, check: Callable[[str], object],
        then: Callable[[str], object],
    ):  # fmt: skip
        super().__init__(id="editor")
        self._title, self._value, self._hint = title, value, hint
        self._check, self._then, self._said = check, then, (hint, "dim")

    def compose(self) -> ComposeResult:
        title, keys = f"── {self._title}", "enter accepts, esc cancels"
        yield Wrapped("head", lambda width: [rule(title, width, keys)])
        yield Wrapped("trouble", self._rows)
        yield Input(self._value, compact=True, select_on_focus=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def _rows(self, width: int) -> list[Row]:
        text, style = self._said
        return [((line, style),) for line in wrap(text, width - 2) or [""]]

    def _say(self, text: str, style: str) -> None:
        self._said = text, style
        self.query_one("#trouble", Wrapped).fit()

    def _is_good(self, text: str, style: str) -> bool:
        try:
            self._check(text)
        except UsageError as error:
            self._say(str(error), style)
            return False
        return True

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._is_good(event.value, "warn"):
            self._say(self._hint, "dim")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self._is_good(event.value, "crit"):
            self.close()
            self._then(event.value.strip())
