"""`sqlenv data ...`: the flags of its subcommands, what they print and the files that they write.

The work is done elsewhere: `inspection`, `validation`, `export`, `fetch`. Each returns its exit status; what a person
has to correct is a DataError, which `sqlenv` prints in one line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console

from env_server.cache import default_cache_dir
from env_server.data.cli import doctor, suggest
from env_server.data.cli.export import DATABASES, export_dataset
from env_server.data.cli.fetch import LICENCE, NAMES, REPO, fetch
from env_server.data.cli.inspection import counted, inspect_text
from env_server.data.cli.validation import Validation, validate, validation_text
from env_server.data.curation import NothingUsableError
from env_server.data.doctor.diagnosis import Diagnosis, diagnose
from env_server.data.loading import DEFAULT_SPEC, GENERATED, SYNTAX, load_dataset
from env_server.dataset import Dataset, Split
from env_server.errors import DataError
from env_server.settings import EnvSettings, JudgingSettings
from env_server.test_suites.building import TITLE, build_suites
from env_server.types import AnswerMode
from sqlenv.parser import Parser, choice, output_file, output_folder, whole_number
from sqlenv.progress import reported

_INSPECT = """\
Show what a data set holds: questions by split and hardness, databases, what was left out and why, samples with
their gold SQL and gold rows.
"""
_INSPECT_EXAMPLE = """\
examples:
  sqlenv data inspect                                  the built-in data set
  sqlenv data inspect spider:data/spider --db farm     one database, with its columns
"""
_VALIDATE = """\
Account for every question of a data set: run each gold query, list each question that is left out with the reason,
count duplicates and answers of 0, show the split by database, and play the gold answer of each usable question
through the environment. Warns of what `sqlenv data doctor` finds in the files. Ends with status 0 when there are
usable questions and every gold answer is judged correct, else with 1.
"""
_VALIDATE_EXAMPLE = """\
examples:
  sqlenv data validate spider:data/spider
  sqlenv data validate my-shop --answer_mode sql --out questions.jsonl
  sqlenv data validate synthetic --json | jq .split
"""
_BUILD = """\
Make the test databases on which queries are judged besides the question's own, as `serve`, `train` and `evaluate` do
when they start with --answer_mode sql. What is there already is not made again, so a build that was interrupted goes
on; SQLENV_CACHE_DIR says where they are kept.
"""
_BUILD_EXAMPLE = """\
examples:
  sqlenv data build spider:data/spider                 about a second of a core for each question, on all cores
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
  sqlenv data fetch spider --out data/spider           then: sqlenv data validate spider:data/spider
"""


def run(argv: Sequence[str]) -> int:
    """Run `sqlenv data`; `argv` begins with its subcommand. Returns the exit status. Raises DataError."""
    parser = Parser(prog="sqlenv data", description="Look at, check, convert and fetch data sets.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, job: Callable[[argparse.Namespace], int], short: str, text: str, example: str) -> Parser:
        added = commands.add_parser(name, help=short, description=text, epilog=example)
        added.set_defaults(job=job)
        return added

    inspect = command("inspect", _inspect, "what a data set holds and what was left out", _INSPECT, _INSPECT_EXAMPLE)
    _add_data(inspect, AnswerMode.VALUE, optional=True)
    inspect.add_argument("--db", help="show this database alone, with its columns")
    inspect.add_argument(
        "--questions", type=whole_number(0), default=3, help="sample questions shown (default: %(default)s)"
    )

    check = command("validate", _validate, "account for every question", _VALIDATE, _VALIDATE_EXAMPLE)
    _add_data(check, AnswerMode.VALUE)
    check.add_argument(
        "--no_variants", action="store_true", help="sql mode: judge on each database alone; seconds, not minutes"
    )
    check.add_argument(
        "--guessable",
        action="store_true",
        help="also flag questions whose answer many wrong queries give as well; minutes, not seconds",
    )
    check.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    check.add_argument(
        "--out", type=output_file, metavar="FILE", help="write what became of each question, as JSON Lines"
    )

    build = command("build", _build, "make the test databases of sql mode", _BUILD, _BUILD_EXAMPLE)
    build.add_argument("data", help=SYNTAX)
    build.add_argument(
        "--split",
        type=choice(Split),
        choices=list(Split),
        default=Split.ALL,
        help="whose questions (default: %(default)s)",
    )
    build.add_argument("--processes", type=whole_number(1), help="how many make them (default: one for each core)")

    examined = command("doctor", doctor.run, "what is wrong, where, and the repair", doctor.DESCRIPTION, doctor.EPILOG)
    _add_data(examined, AnswerMode.VALUE)
    doctor.add_flags(examined)

    proposed = command("suggest", suggest.run, "propose verified questions", suggest.DESCRIPTION, suggest.EPILOG)
    suggest.add_flags(proposed)

    export = command("export", _export, "write it for Hugging Face datasets and TRL", _EXPORT, _EXPORT_EXAMPLE)
    _add_data(export, AnswerMode.SQL)
    export.add_argument(
        "--out", type=output_folder, required=True, metavar="FOLDER", help="a folder that does not exist yet"
    )
    export.add_argument(
        "--split",
        type=choice(Split),
        choices=list(Split),
        default=Split.ALL,
        help="what to write (default: %(default)s)",
    )

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


def _add_data(parser: Parser, answer_mode: AnswerMode, *, optional: bool = False) -> None:
    if optional:
        parser.add_argument("data", nargs="?", default=DEFAULT_SPEC, help=f"{SYNTAX} (default: %(default)s)")
    else:
        parser.add_argument("data", help=SYNTAX)
    parser.add_argument(
        "--answer_mode",
        type=choice(AnswerMode),
        choices=list(AnswerMode),
        default=answer_mode,
        help="what ANSWER carries; decides which golds are too large (default: %(default)s)",
    )


def _inspect(args: argparse.Namespace) -> int:
    dataset = _load(args.data, args.answer_mode)
    Console(highlight=False).print(inspect_text(dataset, db_id=args.db, samples=args.questions))
    return 0


def _validate(args: argparse.Namespace) -> int:
    try:
        dataset = _load(args.data, args.answer_mode)
    except NothingUsableError as error:
        dataset = error.dataset
    settings = EnvSettings(judging=JudgingSettings(variants=not args.no_variants))
    with reported("playing the gold answers") as progress:
        validation = validate(dataset, args.answer_mode, settings, progress.update, guessable=args.guessable)
    warnings = _warnings(args.data, args.answer_mode)
    _print_validation(validation, warnings, as_json=args.json)
    if args.out is not None:
        _write(args.out, (json.dumps(record, ensure_ascii=False) + "\n" for record in validation.records()))
    if validation.problem:
        sys.stderr.write(f"sqlenv data validate: {validation.problem}\n")
    return 1 if validation.problem else 0


def _build(args: argparse.Namespace) -> int:
    dataset = _load(args.data, AnswerMode.SQL)
    questions, sandbox = dataset.select(args.split), EnvSettings().sandbox
    with reported(TITLE) as progress:
        made = build_suites(
            *(dataset.databases, questions, sandbox, default_cache_dir()),
            progress=progress.update,
            processes=args.processes,
        )
    _say(f"{counted(len(questions), 'question')} of {dataset.name}: made the test databases of {made:,} gold queries")
    return 0


def _export(args: argparse.Namespace) -> int:
    dataset = _load(args.data, args.answer_mode)
    with reported("writing the questions") as progress:
        counts = export_dataset(dataset, args.out, args.split, progress=progress.update)
    lines = [f"{args.out / f'{split}.parquet'}: {counted(count, 'question')}" for split, count in counts.items()]
    lines += [f"{args.out / DATABASES}: the databases", f"{args.out / 'README.md'}: how to train on it"]
    _say("\n".join(lines))
    return 0


def _fetch(args: argparse.Namespace) -> int:
    raw = fetch(args.name, args.out, repo=args.repo, revision=args.revision, say=_say)
    _say(f"{counted(len(raw.questions), 'question')} over {counted(len(raw.databases), 'database')} in {args.out}")
    _say(f"next: sqlenv data validate {args.name}:{args.out}")
    return 0


def _warnings(spec: str, answer_mode: AnswerMode) -> Diagnosis | None:
    """Look for what the doctor finds, but for what takes variants; None for a generated data set, which is ours."""
    if spec.partition(":")[0] in GENERATED:
        return None
    with doctor.progress_bar() as progress:
        return diagnose(spec, default_cache_dir(), answer_mode=answer_mode, variants=False, progress=progress)


def _print_validation(validation: Validation, warnings: Diagnosis | None, *, as_json: bool) -> None:
    told = [] if warnings is None else doctor.beside_validation(warnings)
    if as_json:
        found = {} if warnings is None else {"warnings": doctor.summary(warnings, told)["findings"]}
        sys.stdout.write(json.dumps({**validation.summary(), **found}) + "\n")
        return
    console = Console(highlight=False)
    console.print(validation_text(validation), soft_wrap=True)
    if warnings is not None and told:
        console.print(doctor.text_of(warnings, told), soft_wrap=True)


def _say(text: str) -> None:
    Console(highlight=False).print(text, markup=False, soft_wrap=True)


def _load(spec: str, answer_mode: AnswerMode) -> Dataset:
    """Load the data set, and report how far that is."""
    with reported("running the gold queries") as progress:
        return load_dataset(spec, answer_mode=answer_mode, progress=progress.update)


def _write(target: Path, lines: Iterable[str]) -> None:
    try:
        with target.open("w", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}. Choose another place") from error
