"""`sqlenv compare A B`: two evaluations, or two runs, question by question; B's success minus A's.

A and B are each a run's folder (its evaluation after training), RUN:LABEL for another one of its evaluations (before,
random, oracle, step-000050), a file that `sqlenv evaluate --episodes_out FILE.jsonl` wrote, or such a file in a folder
of them, FOLDER:FILE. The questions that both were judged on are paired; intervals are of 95%, with the database as the
cluster (the jackknife over databases with the quantile of t, in Bonett and Price's interval of a paired difference;
trainer/eval/statistics.py has the method and its sources).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from sqlenv.parser import Parser, output_file
from trainer.comparison.comparison import compare_sides
from trainer.comparison.sides import find_side
from trainer.comparison.text import SHOWN, print_comparison
from trainer.eval.statistics import intervals_as_pairs


def build_parser() -> Parser:
    """The flags of `sqlenv compare`."""
    parser = Parser(
        prog="sqlenv compare",
        description=__doc__,
        epilog="examples:\n  sqlenv compare runs/first:before runs/first\n"
        "  sqlenv compare runs/first runs/second --png comparison.png\n"
        "  sqlenv compare base.jsonl runs/first --json",
    )
    parser.add_argument("a", metavar="A", help="what is compared with, such as runs/first:before")
    parser.add_argument("b", metavar="B", help="what is compared, such as runs/first")
    parser.add_argument("--all", action="store_true", help=f"show all that differs, not the first {SHOWN} of each kind")
    parser.add_argument(
        "--png",
        type=output_file,
        metavar="FILE",
        help="draw it as well: success, and paired differences by difficulty and database; of two runs, training too",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    return parser


def run(argv: Sequence[str]) -> int:
    """Compare as the flags say. Raises SQLEnvError."""
    parser = build_parser()
    args = parser.parse_args(argv)
    a, b = find_side(args.a), find_side(args.b)
    comparison = compare_sides(a, b)
    if args.json:
        sys.stdout.write(json.dumps(asdict(comparison, dict_factory=intervals_as_pairs)) + "\n")
    else:
        print_comparison(comparison, Console(highlight=False), everything=args.all)
    if args.png is not None:
        # Drawing takes a second to import, which the text need not wait for.
        from trainer.comparison.picture import write_picture

        write_picture(comparison, a.run, b.run, args.png)
        Console(stderr=args.json, highlight=False).print(f"picture {args.png}", soft_wrap=True, markup=False)
    return 0
