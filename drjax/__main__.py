"""Look into a plan file: `python -m drjax inspect round.drjax [--draw round.svg]`."""

import argparse
import sys
from importlib.metadata import version

import jax

from drjax._errors import DrjaxError
from drjax._plan_file.inspect import inspect


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if the plan file cannot be read or drawn, else 0.

    The arguments are those after the name of the program; None: those of `sys.argv`.
    """
    parser = argparse.ArgumentParser(prog="python -m drjax", description=__doc__)
    versions = f"drjax {version('drjax')}, JAX {jax.__version__}"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "inspect", help="print the plan of a file, its ledger, versions, custom calls"
    )
    command.add_argument("path", help="a file that plan.save wrote")
    command.add_argument("--draw", metavar="PICTURE", help="draw it: .svg or .png")
    options = parser.parse_args(arguments)
    try:
        plan, report = inspect(options.path)
        if options.draw:
            plan.draw(options.draw)
    except (DrjaxError, OSError) as error:
        print(f"drjax: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
