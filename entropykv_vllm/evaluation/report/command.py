# SPDX-License-Identifier: Apache-2.0
"""`entropykv report`: measure all that docs/quality.md says, and put it into its tables.

Sections run one after the other, prompt by prompt; what is stored already is not run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from entropykv_vllm.errors import UsageError
from entropykv_vllm.evaluation import options, table
from entropykv_vllm.evaluation.options import words
from entropykv_vllm.evaluation.progress import bar, onto
from entropykv_vllm.evaluation.report import chapters, measure, page
from entropykv_vllm.evaluation.report.sections import Section
from entropykv_vllm.help_text import command_parser
from entropykv_vllm.json_file import add_json, takes_stdout, write


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = command_parser("report", __doc__, EPILOG)
    p.add_argument(
        "--chapters",
        type=words(str),
        default=",".join(chapters.CHAPTERS),
        help="what to measure, of %(default)s (default: all)",
    )
    options.add_out(p, "results/report", "--data")
    p.add_argument(
        "--page",
        type=options.readable,
        metavar="FILE",
        help="a Markdown page whose tables are filled in",
    )
    p.add_argument(
        "--stored", action="store_true", help="measure nothing, only write what is stored"
    )
    add_json(p)
    return p


EPILOG = """\
It takes hours; --chapters takes some of it. Rows are named by policy, keep ratio and bits:
"all 1 8" evicts nothing and stores all old tokens in 8 bits.
"""


def measured(section: Section, folder: Path, stored: bool) -> list:
    """Return the results of a section, running what is missing unless only stored ones count."""
    from entropykv_vllm.evaluation.offline import runs

    if stored:
        return runs.stored(folder / f"{section.name}.jsonl", section.spec())[: section.prompts]
    with bar(section.prompts, "prompt", section.name) as shown:
        return measure.run(section, folder, onto(shown))


def missing(found: chapters.Found, folder: Path) -> str:
    """Say which sections have no results, and whether others lie in their place."""
    files = [folder / f"{section.name}.jsonl" for section, results in found if not results]
    return ", ".join(
        f"{file} is of another specification" if file.is_file() else f"there is no {file}"
        for file in files
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    if not args.chapters:
        raise UsageError(f"--chapters is empty: choose of {', '.join(chapters.CHAPTERS)}")
    for name in args.chapters:
        if name not in chapters.CHAPTERS:
            raise UsageError(f"'{name}' is not a chapter: choose of {', '.join(chapters.CHAPTERS)}")
    tables: dict[str, str] = {}
    for name in args.chapters:
        chapter = chapters.CHAPTERS[name]
        found = [(s, measured(s, args.out, args.stored)) for s in chapter.sections(args.out)]
        if all(results for _, results in found):
            new = chapter.tables(found, args.out)
            for title, text in new.items():
                if not takes_stdout(args.json):
                    print(f"\n{title}\n\n{text}", flush=True)
            tables |= new
        else:
            print(f"\n{name} is left out: {missing(found, args.out)}", file=sys.stderr)
    if args.page and (unknown := page.fill(args.page, tables)):
        print(f"\n{args.page} has no place for: {', '.join(unknown)}", file=sys.stderr)
    if args.json is not None:
        write({title: table.records(text) for title, text in tables.items()}, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
