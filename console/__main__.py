"""`python -m console` is `nsa-console`."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an old Python runs this line before any installation
    sys.exit("nsa-console needs Python 3.11 or newer; this is " + sys.version.split()[0])

if not sys.flags.safe_path:
    # `python -m` puts the working directory first in sys.path; the project folder replaces it.
    sys.path[0] = __file__.rpartition("/console/")[0]

from console.cli import main

if __name__ == "__main__":
    sys.exit(main())
