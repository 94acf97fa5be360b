"""The program: `nsa-console`, and also `python -m console`."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an old Python runs this line before any installation
    sys.exit("nsa-console needs Python 3.11 or newer; this is " + sys.version.split()[0])


def main() -> int:
    """Runs the console; ctrl+c also ends the imports, which may be slow, in one sentence."""
    try:
        from console.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("nsa-console: ended by ctrl+c; runs continue\n")
        return 130
    return run()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `python -m` puts the working directory first in sys.path; the project folder replaces it.
        sys.path[0] = __file__.rpartition("/console/")[0]
    sys.exit(main())
