"""An alert is raised once until it is cleared; its words may change with what is found."""

from __future__ import annotations

from console.supervisor.alerts import Alerts
from console.supervisor.rundir_io import Directory


def test_an_open_alert_that_is_told_anew_is_not_raised_twice():
    directory, events = Directory(), []

    def event(kind: str, text: str, level: str = "info", **more: str) -> dict[str, str]:
        events.append((kind, text))
        return {"kind": kind, "text": text, "level": level} | more

    try:
        alerts = Alerts(event, directory)
        assert alerts.raise_("stall", "rank 0 is stopped", "crit", "3")
        alerts.retell("stall", "rank 1 is behind")
        assert not alerts.raise_("stall", "rank 2 is behind", "crit", "3")
        assert alerts.open()["stall"]["text"] == "rank 1 is behind"
        assert events == [("alert", "rank 0 is stopped")]
    finally:
        directory.close()
