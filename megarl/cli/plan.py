"""`megarl plan reshard`: the certificate of a weight push. Needs no GPU, no weights, no torch."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from megarl.config.errors import require, require_positive

if TYPE_CHECKING:
    from megarl.reshard.plan import Certificate

__all__ = ["add_plan_command"]

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
EPILOG = """example:
  megarl plan reshard --model my/model --train tp=4,pp=2,dp=2 --rollout tp=2,dp=8

--train keys: tp, pp, dp, cp, ep, etp, vpp (ranks ordered tp, cp, dp, pp, fastest first).
--rollout keys: tp, pp, dp, ep, etp; a replica is tp * pp ranks, or ep * etp * pp when that is more
(attention is then data parallel inside it). etp, the tp of experts: tp without ep; with ep, 1 in
training and tp / ep in rollout.
Bytes are exact. Seconds are simulated: full links, one NIC per GPU, lock-step windows.
Exit status: 0 every element arrives exactly once, 1 the checker disagrees, 2 bad input.
"""


def add_plan_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `plan reshard`."""
    plan = commands.add_parser("plan", help="show what a layout costs before running it")
    kinds = plan.add_subparsers(title="what", metavar="WHAT", required=True)
    command = kinds.add_parser(
        "reshard",
        help="bytes, windows and seconds of moving weights from training to rollout",
        description="Plan the weight push between two layouts and print its certificate.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--model", required=True, metavar="PATH", help="Hugging Face folder, or its config.json")
    add("--train", required=True, metavar="SIZES", help="training layout, e.g. tp=4,pp=2,dp=2")
    add("--rollout", required=True, metavar="SIZES", help="rollout layout, e.g. tp=2,dp=8")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs on fast links (default 8)")
    add(
        "--nic-gbps",
        type=float,
        default=400.0,
        metavar="R",
        help="Gbit/s per GPU between nodes, each way (default 400)",
    )
    add(
        "--nvlink-gbps",
        type=float,
        default=3600.0,
        metavar="R",
        help="Gbit/s per GPU inside a node, each way (default 3600)",
    )
    add(
        "--dtype",
        choices=tuple(DTYPE_BYTES),
        default="bf16",
        help="of the engine's weights, and so on the wire (default bf16)",
    )
    add(
        "--placement",
        choices=("optimal", "contiguous"),
        default="optimal",
        help="which GPU plays which rollout rank: most bytes stay, or rank r on GPU r",
    )
    add("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_reshard)


def _reshard(args: argparse.Namespace) -> int:
    # numpy and scipy are loaded for this command only
    from megarl.reshard.plan import Hardware, model_shape, parse_mesh, plan_reshard, read_config

    for key in ("gpus_per_node", "nic_gbps", "nvlink_gbps"):
        require_positive(f"--{key.replace('_', '-')}", getattr(args, key))
    model = model_shape(read_config(args.model))
    train, rollout = parse_mesh("train", args.train), parse_mesh("rollout", args.rollout)
    require(
        train.size == rollout.size,
        "--rollout",
        args.rollout,
        f"has {rollout.size} ranks and --train has {train.size}",
        "use equal products of tp, pp, dp (and cp)",
    )
    hardware = Hardware(
        gpus_per_node=args.gpus_per_node, nic_gbps=args.nic_gbps, nvlink_gbps=args.nvlink_gbps
    )
    certificate = plan_reshard(
        model, train, rollout,
        hardware=hardware, element_size=DTYPE_BYTES[args.dtype], placement=args.placement,
    ).certificate  # fmt: skip
    if args.json:
        print(json.dumps(certificate.as_dict()))
    else:
        print(_table(args, certificate))
    return 0 if certificate.exactly_once else 1


def _table(args: argparse.Namespace, c: Certificate) -> str:
    def size(num_bytes: float) -> str:
        return f"{num_bytes / 1e9:12.4f} GB  {num_bytes / c.model_bytes:8.4f} M"

    recv, bound = c.recv_bytes_per_rank, c.lower_bound_bytes_per_rank
    lines = [
        f"{args.train} -> {args.rollout}: {c.world_size} GPUs, {args.gpus_per_node} per node, "
        f"{args.dtype}, {args.placement} placement",
        "",
        f"model (M)                     {size(c.model_bytes)}",
        f"received per rank   max       {size(recv.max)}",
        f"                    mean      {size(recv.mean)}",
        f"  lower bound       max       {size(bound.max)}",
        f"                    mean      {size(bound.mean)}",
        f"  uncut tensors     max       {size(c.replicated_recv_bytes_per_rank.max)}  (part of it)",
        f"  full gather       max       {size(c.full_gather_bytes_per_rank)}",
        f"sent per rank       max       {size(c.sent_bytes_per_rank.max)}",
        f"into a node         max       {size(c.node_ingress_bytes.max)}",
        f"  lower bound       max       {size(c.node_ingress_bytes.lower_bound)}",
        f"peak buffer per rank          {size(c.peak_buffer_bytes)}",
        f"windows             {c.num_windows:>14d}   operations of a rank: {c.num_ops_max}, "
        f"in a window: {c.num_ops_window_max}",
        f"seconds, simulated  {c.predicted_seconds:14.3f}   "
        f"at {args.nic_gbps:g} Gbit/s between nodes, {args.nvlink_gbps:g} inside",
        f"planned in          {c.plan_seconds:12.2f} s",
        f"exactly once                   {'yes' if c.exactly_once else 'NO'}",
        *(f"  {error}" for error in c.errors),
        "",
        _role_line(c.role_map),
        "The bound: a GPU must end with its rollout shard and starts with its training shard, so",
        "it receives at least what of the first is not in the second; a node, what its GPUs want",
        "and none of them holds.",
    ]
    return "\n".join(lines)


def _role_line(role_map: list[int]) -> str:
    if role_map == list(range(len(role_map))):
        return "Rollout rank r is on GPU r."
    shown = " ".join(map(str, role_map[:64]))
    more = f" ... ({len(role_map)} in all, see --json)" if len(role_map) > 64 else ""
    return f"GPU of rollout rank 0, 1, ...: {shown}{more}"
