"""`sqlenv export`: its flags, read before anything heavy is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from sqlenv.parser import Parser, output_folder
from trainer.next_command import what_next

DTYPES = ("float32", "bfloat16", "float16")
DESCRIPTION = """\
Write a trained policy as a plain checkpoint, with its card: it needs neither SQLEnv nor PEFT.

An adapter is merged into its base, summed in float32 and rounded once. No tensor of a full checkpoint changes, unless
--dtype asks for it. The folder appears complete, or not at all.
"""


def run(argv: Sequence[str]) -> int:
    """Export as the flags say; push when asked. Raises SQLEnvError."""
    args = build_parser().parse_args(argv)
    import torch

    from trainer.export.checkpoint import export
    from trainer.export.hub import Destination

    destination = None
    if args.push_to_hub:
        destination = Destination(args.push_to_hub, args.hub_private_repo or None, args.hub_token, args.hub_revision)
        destination = destination.prepared()
    exported = export(
        args.policy,
        args.out,
        dtype=args.dtype and getattr(torch, args.dtype),
        name=destination.repo if destination else None,
        trust_remote_code=args.trust_remote_code,
    )
    for line in exported.lines:
        sys.stderr.write(f"sqlenv export: {line}\n")
    console = Console()
    said = f"{exported.parameters:,} parameters, {exported.dtype}, in {exported.folder}"
    console.print(said, highlight=False, soft_wrap=True)
    further = what_next(["evaluate", "--policy", str(args.out)], ["inference", "--model", str(args.out)])
    console.print(further, highlight=False, soft_wrap=True)
    if destination:
        console.print(f"pushed to {destination.push(exported.folder)}", highlight=False, soft_wrap=True)
    return 0


def build_parser() -> Parser:
    """The flags of `sqlenv export`."""
    parser = Parser(
        prog="sqlenv export",
        description=DESCRIPTION,
        epilog="examples:\n  sqlenv export runs/mine --out exported --dtype bfloat16\n"
        "  sqlenv export runs/mine/checkpoint-50 --out exported\n"
        "  sqlenv export runs/mine --out exported --push_to_hub me/my-policy",
    )
    parser.add_argument("policy", help="a run's folder, a checkpoint's, an adapter's, or a model on the Hub")
    parser.add_argument("--out", type=output_folder, required=True, help="the folder to write; it must be new or empty")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as the checkpoint or base has)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the policy")
    parser.add_argument("--push_to_hub", metavar="REPO", help="push the folder to this repository on the Hub, too")
    parser.add_argument("--hub_private_repo", action="store_true", help="make the repository private, if it is made")
    parser.add_argument("--hub_token", help="token for the Hub (default: the one of `hf auth login`)")
    parser.add_argument("--hub_revision", help="branch of the repository (default: main)")
    return parser
