"""`hvdx report`: a page and a text about recorded runs."""

import argparse
from pathlib import Path

from hvdx.cli.common.options import parse_target
from hvdx.errors import ConfigError
from hvdx.foreign import printable

DETAILS = """\
DIR is a folder of `hvdx compare`, or one that HVDX_RECORD named. The command prints the verdict, a table and the time
of a step as bars, and writes the page DIR/report.html. The page needs no other file and no network: send it as it is.
Runs that failed or are incomplete are listed with their reason and their log. The page needs Matplotlib and Jinja:
pip install 'hvdx[report]'. See also docs/report.md.

  HVDX_RECORD=run1 hvdx run -n 2 python train.py     record a run
  hvdx report run1                                   a page about one run
  hvdx report run1 run2 run3 --output three.html     a page that compares runs of your own
  hvdx report comparison --text                      only the text

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="DIR", help="folder of recorded runs, or of a comparison")
    add("--output", type=Path, metavar="FILE.html", help="the page (default: report.html in the first DIR)")
    add("--target", metavar="METRIC=VALUE", help="also compare the time until a metric reaches a value")
    add("--text", action="store_true", help="print the text only; write no page")
    add("--force", action="store_true", help="overwrite the output even if it is not a report")


def run(args: argparse.Namespace) -> int:
    """Read the records, print the text, and write the page."""
    from hvdx.report import page, report_file
    from hvdx.report.overview import load
    from hvdx.report.text import text
    from hvdx.report.verdict import judge

    target = None if args.target is None else parse_target(args.target)
    for folder in args.folders:
        if not folder.is_dir():
            raise ConfigError(
                f"report: expected a folder of recorded runs, got {folder}, which is not a folder. "
                "Do: record a run with HVDX_RECORD=DIR, or run hvdx compare."
            )
    path = args.output or args.folders[0] / "report.html"
    if not args.text:
        report_file.check(path, page.KIND, args.force)
    overview = load(args.folders, target)
    verdict = judge(overview.runs, overview.target, overview.troubles)
    print(printable(text(overview, verdict.text())), flush=True)
    if not args.text:
        report_file.write(page.render(overview, verdict, args.folders[0].resolve().name), path, page.KIND, args.force)
        print(f"\npage: {path}")
    return 0
