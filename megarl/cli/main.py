"""The command line. Settings that cannot work end it with status 2 before torch is imported."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import megarl
from megarl.cli.plan import add_plan_command
from megarl.common.log import quiet_third_parties
from megarl.config import (
    ConfigError,
    SftConfig,
    TrainConfig,
    load_config,
    validate_sft,
    validate_train,
)
from megarl.config.reference import reference_markdown, reference_text

if TYPE_CHECKING:
    from megarl.config import ResolvedDims

__all__ = ["main"]

EXIT_USAGE = 2
PEER_GRACE_S = 0.5
_SCHEMAS: dict[str, type[TrainConfig] | type[SftConfig]] = {"train": TrainConfig, "sft": SftConfig}
_SOURCE_NAMES = ("arithmetic", "gsm8k", "mawps")  # megarl.data.prepare.SOURCES, which imports torch


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 failed, 2 bad settings or data."""
    args = _parser().parse_args(_flags_first(sys.argv[1:] if argv is None else list(argv)))
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except ConfigError as error:
        return _refuse(error)
    except BrokenPipeError:  # the reader of our output, e.g. `head`, has gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0


def _flags_first(argv: list[str]) -> list[str]:
    """Let `train c.yaml --check a=1` work: argparse takes no positional after a flag in between."""
    if argv[:1] not in (["train"], ["sft"]):
        return argv
    return [argv[0], *sorted(argv[1:], key=lambda word: not word.startswith("-"))]


def _refuse(error: ValueError) -> int:
    """Say what is wrong once per job: under torchrun every rank finds the same."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"megarl: {error}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all ranks when the first one fails: let rank 0 speak before that.
        time.sleep(PEER_GRACE_S)
    return EXIT_USAGE


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _train(args: argparse.Namespace) -> int:
    config = load_config(TrainConfig, args.config, args.overrides)
    dims = validate_train(config, world_size=_world_size())
    if args.check:
        return _report_valid(args.config, dims)
    quiet_third_parties()
    from megarl.trainer.run import train

    return train(config)


def _sft(args: argparse.Namespace) -> int:
    config = load_config(SftConfig, args.config, args.overrides)
    dims = validate_sft(config, world_size=_world_size())
    if args.check:
        return _report_valid(args.config, dims)
    quiet_third_parties()
    from megarl.trainer.sft import sft

    return sft(config)


def _report_valid(path: str, dims: ResolvedDims) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{path} is valid: tp={dims.tp} cp={dims.cp} pp={dims.pp} dp={dims.dp}")
    return 0


def _config(args: argparse.Namespace) -> int:
    if args.command_name == "markdown":
        print(reference_markdown(), end="")
    else:
        print(reference_text(_SCHEMAS[args.command_name]), end="")
    return 0


def _prepare(args: argparse.Namespace) -> int:
    quiet_third_parties()
    from megarl.data import DataError
    from megarl.data.prepare import SOURCES, prepare

    try:
        counts = prepare(
            SOURCES[args.name], args.input, args.output,
            holdout=args.holdout, suffix=args.suffix, system=args.system, shots=args.shots,
            holdout_seed=args.holdout_seed,
        )  # fmt: skip
    except (DataError, OSError) as error:
        return _refuse(ValueError(str(error)))
    for name, count in counts.items():
        print(f"{Path(args.output) / name}: {count} rows")
    return 0


def _demo_assets(args: argparse.Namespace) -> int:
    quiet_third_parties()
    from megarl.cli.demo import write_demo_assets

    for name, count in write_demo_assets(Path(args.output), seed=args.seed).items():
        print(f"{Path(args.output) / name}.parquet: {count} rows")
    print(f"{Path(args.output) / 'model'}: a random model and its tokenizer")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl",
        description="Reinforcement learning for language models with Megatron and SGLang.",
    )
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run_command(
        commands, "train", _train, "reinforcement learning", "configs/grpo_demo_cpu.yaml"
    )
    _add_run_command(commands, "sft", _sft, "supervised warm start", "configs/sft_demo_cpu.yaml")
    _add_prepare(commands)
    add_plan_command(commands)
    config = commands.add_parser(
        "config", help="print every setting with type, default and meaning"
    )
    config.add_argument(
        "command_name", choices=(*_SCHEMAS, "markdown"), help="whose settings; all as Markdown"
    )
    config.set_defaults(run=_config)
    demo = commands.add_parser(
        "demo-assets", help="write a tiny model and arithmetic problems for the demo"
    )
    demo.add_argument("--output", required=True, metavar="DIR", help="folder to write to")
    demo.add_argument(
        "--seed", type=int, default=0, help="of the weights and the problems (default 0)"
    )
    demo.set_defaults(run=_demo_assets)
    return parser


def _add_run_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    what: str,
    example: str,
) -> None:
    command = commands.add_parser(
        name,
        help=f"{what}; start it with torchrun for several ranks",
        description=f"{what.capitalize()} as a YAML file says, which holds what differs from the\n"
        "defaults; key=value on the command line wins over the file.",
        epilog=f"example:\n  torchrun --nproc-per-node 2 -m megarl {name} {example} \\\n"
        "    model.path=my/model 'data.train_files=[my/train.parquet]' "
        "trainer.output_dir=runs/1\n\n"
        f"`megarl config {name}` prints every key with its type, default and meaning.\n"
        "Exit status: 0 done, 2 a setting cannot work, else the run failed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("config", metavar="CONFIG.yaml", help="the settings")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that win over the file, e.g. optim.lr=1e-6; the value is read as YAML",
    )
    command.add_argument("--check", action="store_true", help="check the settings and stop")
    command.set_defaults(run=run)


def _add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "prepare",
        help="turn a local JSON-lines data set into Parquet prompt files",
        description="Write train.parquet and test.parquet (last --holdout rows) in verl's schema.",
    )
    command.add_argument("name", choices=_SOURCE_NAMES, help="data set")
    command.add_argument("--input", required=True, metavar="FILE", help="JSON-lines file")
    command.add_argument("--output", required=True, metavar="DIR", help="folder to write to")
    command.add_argument(
        "--holdout",
        type=int,
        default=100,
        metavar="N",
        help="last rows kept for evaluation (default 100)",
    )
    command.add_argument(
        "--holdout-seed", type=int, metavar="SEED",
        help="draw the held-out rows at random from this seed; default: the last rows",
    )  # fmt: skip
    command.add_argument(
        "--suffix",
        metavar="TEXT",
        help="appended to each question; default: the data set's own, '' for none",
    )
    command.add_argument(
        "--system", metavar="TEXT", help="system message before each question; default: none"
    )
    command.add_argument(
        "--shots",
        metavar="FILE",
        help="JSON lines of question and answer, shown as earlier turns; default: none",
    )
    command.set_defaults(run=_prepare)


if __name__ == "__main__":
    sys.exit(main())
