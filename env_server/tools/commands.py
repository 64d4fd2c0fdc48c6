"""`sqlenv data ...`: its subcommands, their flags and what they print.

The work is done elsewhere: `doctor`, `suggest`, `export`, `fetch`. Each returns its exit status; what a person has to
correct is a DataError, which `sqlenv` prints in one line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from env_server.cache import default_cache_dir
from env_server.data.loading import SYNTAX, load_dataset
from env_server.dataset import Dataset, Split
from env_server.settings import EnvSettings
from env_server.test_suites.store import TITLE, build_suites
from env_server.tools import doctor, suggest
from env_server.tools.export import DATABASES, export_dataset
from env_server.tools.fetch import LICENCE, NAMES, REPO, fetch
from env_server.tools.terminal import counted, say
from env_server.types import AnswerMode
from sqlenv.parser import Parser, choice, output_folder, whole_number
from sqlenv.progress import reported

_BUILD = """\
Make the test databases on which queries are judged besides the question's own, as `serve`, `train` and `evaluate` do
when they start with --answer_mode sql. What exists already is not made again, so a build that was interrupted resumes;
SQLENV_CACHE_DIR says where they are kept.
"""
_BUILD_EXAMPLE = """\
examples:
  sqlenv data build spider:data/spider                 about half a second of a core for each question, on all cores
  sqlenv data build my-shop --split train --processes 2
"""
_EXPORT = """\
Write the usable questions for Hugging Face datasets, to train without SQLEnv: train.parquet and eval.parquet with
a text-to-SQL prompt in TRL's conversational format, the databases, and a README.md with a reward function.
"""
_EXPORT_EXAMPLE = """\
example:
  sqlenv data export spider:data/spider --out spider-for-trl
  python -c "from datasets import load_dataset; print(load_dataset('spider-for-trl', split='train')[0]['prompt'])"
"""
_FETCH = f"""\
Download Spider from the Hugging Face Hub and unpack it into a folder that SQLEnv reads. It comes from a copy that is
not its authors' ({REPO}), of which the known file alone is taken: its SHA-256 is verified. An
interrupted download is resumed. Licence: {LICENCE}.
BIRD is not downloaded; the error says where to get it.
"""
_FETCH_EXAMPLE = """\
example:
  sqlenv data fetch spider --out data/spider           then: sqlenv data doctor spider:data/spider
"""


def run(argv: Sequence[str]) -> int:
    """Run `sqlenv data`; `argv` begins with its subcommand. Returns the exit status. Raises DataError."""
    parser = Parser(prog="sqlenv data", description="Check, fix, extend, convert and fetch data sets.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, job: Callable[[argparse.Namespace], int], short: str, text: str, example: str) -> Parser:
        added = commands.add_parser(name, help=short, description=text, epilog=example)
        added.set_defaults(job=job)
        return added

    examined = command("doctor", doctor.run, "what it holds and what is wrong", doctor.DESCRIPTION, doctor.EPILOG)
    _add_data(examined, AnswerMode.VALUE)
    doctor.add_flags(examined)

    proposed = command("suggest", suggest.run, "propose verified questions", suggest.DESCRIPTION, suggest.EPILOG)
    suggest.add_flags(proposed)

    build = command("build", _build, "make the test databases of sql mode", _BUILD, _BUILD_EXAMPLE)
    build.add_argument("data", help=SYNTAX)
    _add_split(build, "whose questions")
    build.add_argument("--processes", type=whole_number(1), help="how many make them (default: one for each core)")

    export = command("export", _export, "write it for Hugging Face datasets and TRL", _EXPORT, _EXPORT_EXAMPLE)
    _add_data(export, AnswerMode.SQL)
    export.add_argument(
        "--out", type=output_folder, required=True, metavar="FOLDER", help="a folder that does not exist yet"
    )
    _add_split(export, "what to write")

    download = command("fetch", _fetch, "download Spider from the Hugging Face Hub", _FETCH, _FETCH_EXAMPLE)
    download.add_argument("name", choices=NAMES, help="the benchmark")
    download.add_argument("--out", type=output_folder, required=True, metavar="FOLDER", help="where to put it")
    download.add_argument(
        "--repo", metavar="OWNER/NAME", default=REPO, help="the copy on the Hub (default: %(default)s)"
    )
    download.add_argument("--revision", help="a commit, branch or tag of the repository")

    args = parser.parse_args(argv)
    status: int = args.job(args)
    return status


def _add_data(parser: Parser, answer_mode: AnswerMode) -> None:
    parser.add_argument("data", help=SYNTAX)
    parser.add_argument(
        "--answer_mode",
        type=choice(AnswerMode),
        choices=list(AnswerMode),
        default=answer_mode,
        help="what ANSWER carries; decides which golds are too large (default: %(default)s)",
    )


def _add_split(parser: Parser, what: str) -> None:
    parser.add_argument(
        "--split",
        type=choice(Split),
        choices=list(Split),
        default=Split.ALL,
        help=f"{what} (default: %(default)s)",
    )


def _build(args: argparse.Namespace) -> int:
    dataset = _load(args.data, AnswerMode.SQL)
    questions, sandbox = dataset.select(args.split), EnvSettings().sandbox
    with reported(TITLE) as progress:
        made = build_suites(
            *(dataset.databases, questions, sandbox, default_cache_dir()),
            progress=progress.update,
            processes=args.processes,
        )
    say(f"{counted(len(questions), 'question')} of {dataset.name}: made the test databases of {made:,} gold queries")
    return 0


def _export(args: argparse.Namespace) -> int:
    dataset = _load(args.data, args.answer_mode)
    with reported("writing the questions") as progress:
        counts = export_dataset(dataset, args.out, args.split, progress=progress.update)
    lines = [f"{args.out / f'{split}.parquet'}: {counted(count, 'question')}" for split, count in counts.items()]
    lines += [f"{args.out / DATABASES}: the databases", f"{args.out / 'README.md'}: how to train on it"]
    say("\n".join(lines))
    return 0


def _fetch(args: argparse.Namespace) -> int:
    raw = fetch(args.name, args.out, repo=args.repo, revision=args.revision, say=say)
    say(f"{counted(len(raw.questions), 'question')} over {counted(len(raw.databases), 'database')} in {args.out}")
    say(f"next: sqlenv data doctor {args.name}:{args.out}")
    return 0


def _load(spec: str, answer_mode: AnswerMode) -> Dataset:
    """Load the data set, and report how far that is."""
    with reported("running the gold queries") as progress:
        return load_dataset(spec, answer_mode=answer_mode, progress=progress.update)
