"""Compiles every Triton configuration for sm_90 without a GPU and checks what comes out.

    python -m megarl_kernels.compile_check [NAME_PART ...]

Fails on register spills, on shared memory beyond what a Hopper SM gives one block, on a matrix
kernel without wgmma (HGMMA) and TMA, and on a memory-bound kernel with accesses below 16 bytes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernels are defined, below

import torch
import triton
from megarl_kernels.gae import triton_backend as gae
from megarl_kernels.linear_log_prob import triton_backend as linear
from megarl_kernels.log_prob import triton_backend as log_prob
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["Case", "Report", "cases", "check", "compile_case", "main"]

MAX_SHARED_BYTES = 227 * 1024
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Case:
    """One kernel with one set of compile-time choices."""

    name: str
    kernel: Any
    types: dict[str, str]  # argument -> Triton type
    constants: dict[str, int]
    multiples_of_16: tuple[str, ...] = ()  # integers, as at run time with aligned shapes
    num_warps: int = 4
    num_stages: int = 3
    is_matrix: bool = False  # must use wgmma
    is_memory_bound: bool = False  # must move 16 bytes per access


@dataclass(frozen=True)
class Report:
    """What the compiler made."""

    registers: int
    spills: int  # local loads and stores
    shared_bytes: int
    wgmma: int
    tma: int
    wide: int  # 16-byte global accesses
    narrow: int  # 1-byte and 2-byte global accesses; one is the target's logit

    def faults(self, case: Case) -> list[str]:
        """Broken rules; empty when all is well."""
        found = []
        if self.spills:
            found.append(f"{self.spills} spills")
        if self.shared_bytes > MAX_SHARED_BYTES:
            found.append(f"shared memory {self.shared_bytes} > {MAX_SHARED_BYTES}")
        if case.is_matrix and not (self.wgmma and self.tma):
            found.append("no wgmma or no TMA")
        if case.is_memory_bound and (not self.wide or self.narrow > 1):
            found.append(f"{self.narrow} narrow and {self.wide} 16-byte accesses")
        return found


def cases() -> Iterator[Case]:
    """Every configuration that the operators launch."""
    f32, i32, i64 = "*fp32", "i32", "*i64"
    scan = dict.fromkeys(("rewards", "values", "bootstrap", "maps", "advantages", "returns"), f32)
    scan |= {"mask": "*u8", "ends": "*i32", "num_tokens": i32, "num_chunks": i32}
    scan |= {"gamma": "fp32", "decay": "fp32"}
    for masked in (0, 1):
        on = {"HAS_VALUES": 1, "HAS_MASK": masked, "HAS_BOOTSTRAP": 1, "CHUNK": gae.CHUNK}
        yield Case(f"gae_chunk_maps mask={masked}", gae.gae_chunk_maps, scan, on, ("num_tokens",))
        yield Case(
            f"gae_scan mask={masked}", gae.gae_scan, scan, on | {"MAPS": gae.MAPS}, ("num_tokens",)
        )
    for kind, dtype in (("*bf16", torch.bfloat16), ("*fp32", torch.float32)):
        rows = dict.fromkeys(("tops", "log_totals", "entropies", "grad_log_probs"), f32)
        rows |= {"grad_entropies": f32, "partials": f32, "targets": i64, "scale": "fp32"}
        rows |= dict.fromkeys(("num_columns", "first_column", "stride", "out_stride"), i32)
        rows |= {"partial_stride": i32, "logits": kind, "out": kind}
        even = ("num_columns", "stride", "out_stride")
        for entropy in (0, 1):
            yield Case(
                f"log_prob_partials {kind[1:]} entropy={entropy}", log_prob.log_prob_partials,
                rows, {"ENTROPY": entropy, "ROWS": log_prob.ROWS, "LANES": log_prob.LANES[dtype]},
                even, num_warps=8, is_memory_bound=True,
            )  # fmt: skip
            yield Case(
                f"log_prob_gradient {kind[1:]} entropy={entropy}", log_prob.log_prob_gradient,
                rows, {"ENTROPY": entropy, "BLOCK": log_prob.GRADIENT_BLOCK},
                even, num_warps=8, is_memory_bound=True,
            )  # fmt: skip
    bm, bn, bk, warps, stages = linear.TILE
    for kind in ("bf16", "fp16"):
        types = dict.fromkeys(("tops", "log_totals", "entropies", "grad_log_probs"), f32)
        types |= {"grad_entropies": f32, "partials": f32, "targets": i64, "scale": "fp32"}
        types |= {"hidden": f"tensordesc<{kind}[{bm},{bk}]>"}
        types |= {"rows": f"tensordesc<{kind}[{bn},{bk}]>"}
        types |= dict.fromkeys(("num_tokens", "num_rows", "first_row", "rows_per_part"), i32)
        types |= {"hidden_size": i32, "out_stride": i32, "out": f"*{kind}"}
        tile = {"BM": bm, "BN": bn, "BK": bk}
        for entropy in (0, 1):
            for name, kernel, extra in (
                ("linear_partials", linear.linear_partials, {}),
                ("linear_gradient", linear.linear_gradient, {"GROUP": 8}),
            ):
                yield Case(
                    f"{name} {bm}x{bn}x{bk} {kind} entropy={entropy}", kernel, types,
                    tile | {"ENTROPY": entropy} | extra,
                    ("hidden_size", "rows_per_part", "out_stride", "num_rows"),
                    num_warps=warps, num_stages=stages, is_matrix=True,
                )  # fmt: skip


def compile_case(case: Case) -> Report:
    """Compile for sm_90 and read the machine code."""
    names = case.kernel.arg_names
    index = {n: i for i, n in enumerate(names)}
    signature = {n: "constexpr" if n in case.constants else case.types[n] for n in names}
    aligned = [n for n in names if signature[n][0] == "*" or n in case.multiples_of_16]
    source = ASTSource(
        case.kernel,
        signature,
        {(index[n],): value for n, value in case.constants.items()},
        {(index[n],): [["tt.divisibility", 16]] for n in aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage

    def count(pattern: str) -> int:
        return len(re.findall(pattern, code))

    return Report(
        registers=int(registers[1]),
        spills=count(r"\b(?:STL|LDL)\b"),
        shared_bytes=compiled.metadata.shared,
        wgmma=count(r"\bHGMMA"),
        tma=count(r"\bUTMALDG"),
        wide=count(r"\b(?:LDG|STG)\S*\.128"),
        narrow=count(r"\b(?:LDG|STG)\S*\.[US](?:8|16)\b"),
    )


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def check(wanted: list[str]) -> int:
    """Print a table of the configurations with a wanted part in their name; count the faulty."""
    head = ("configuration", "regs", "spills", "shared", "HGMMA", "TMA", "wide", "narrow")
    line = "{:48s} {:>5} {:>6} {:>7} {:>5} {:>4} {:>5} {:>6}  {}"
    print(f"triton {triton.__version__}, sm_90\n" + line.format(*head, ""))
    num_faulty = 0
    for case in cases():
        if wanted and not any(part in case.name for part in wanted):
            continue
        report = compile_case(case)
        faults = report.faults(case)
        num_faulty += bool(faults)
        row = (
            report.registers, report.spills, report.shared_bytes, report.wgmma, report.tma,
            report.wide, report.narrow,
        )  # fmt: skip
        print(line.format(case.name, *row, "; ".join(faults) or "ok"), flush=True)
    return num_faulty


def main() -> None:
    """Exit status 1 when a configuration breaks a rule."""
    sys.exit(check(sys.argv[1:]) > 0)


if __name__ == "__main__":
    main()
