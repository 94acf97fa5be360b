"""`nsa-console report`: prints or writes the report of a launch or run."""

from __future__ import annotations

import argparse

from console.commands.output import show
from console.plans import report as reports
from console.sources import launches
from trainers.contract.errors import RefusedError, UsageError


def report(options: argparse.Namespace) -> int:
    """Prints the Markdown, or writes it and its charts to a file."""
    path = launches.find(options.run, options.root)
    output = options.output
    if output is None:
        *_, files = reports.versions(path)
        text = files[path]
        show(options.json, {"path": str(path), "report": text}, [text.rstrip("\n")])
        return 0
    if output.suffix != ".md" or not output.parent.is_dir():
        raise UsageError(f"--output {output}: it must be NAME.md, in an existing directory")
    try:
        *_, files = reports.versions(path, output)
        reports.save(files)
    except OSError as error:
        raise RefusedError(f"cannot write {output}: {error.strerror}") from error
    names = [str(each) for each in files]
    show(options.json, {"path": str(path), "files": names}, [f"wrote {', '.join(names)}"])
    return 0
