"""The CPU shim's installer, in a folder of its own, and its hook, in interpreters of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.rollout.sglang_cpu import ShimError, check, install, uninstall

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="the shim is for CPU torch")


def run(site: Path, code: str) -> str:
    """Output of `code` in a Python that has `site` as a site folder (its .pth files are read)."""
    start = f"import site; site.addsitedir({str(site)!r}); " + code
    done = subprocess.run(
        [sys.executable, "-S", "-c", start], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_install_check_and_uninstall_are_idempotent(tmp_path: Path) -> None:
    with pytest.raises(ShimError, match="is missing; run `python -m"):
        check(tmp_path)
    assert install(tmp_path) == f"installed into {tmp_path}"
    assert install(tmp_path) == f"already installed in {tmp_path}"
    assert check(tmp_path) == f"installed in {tmp_path}"
    assert uninstall(tmp_path) == f"removed 3 files from {tmp_path}"
    assert list(tmp_path.iterdir()) == []
    assert uninstall(tmp_path) == f"removed 0 files from {tmp_path}"


def test_check_notices_an_old_version_and_install_refreshes_it(tmp_path: Path) -> None:
    install(tmp_path)
    hook = tmp_path / "_megarl_sglang_cpu.py"
    hook.write_text("old = True\n")
    with pytest.raises(ShimError, match="is not this version's"):
        check(tmp_path)
    assert install(tmp_path) == f"installed into {tmp_path}"
    check(tmp_path)


def test_a_real_sgl_kernel_is_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    real = tmp_path / "sgl_kernel"
    real.mkdir()
    (real / "__init__.py").write_text("real = True\n")
    with pytest.raises(ShimError, match="real sgl_kernel and is not overwritten"):
        install(tmp_path)
    uninstall(tmp_path)
    assert (real / "__init__.py").read_text() == "real = True\n"


def test_the_hook_imports_nothing_heavy_at_start(tmp_path: Path) -> None:
    install(tmp_path)
    code = "import sys; print(sorted({'torch', 'numpy', 'sglang'} & set(sys.modules)))"
    without = run(tmp_path / "nothing", code)
    assert run(tmp_path, code) == without
    loaded = "import sys; print('_megarl_sglang_cpu' in sys.modules)"
    assert run(tmp_path, loaded) == "True"


def test_the_stand_in_names_what_it_does_not_have(tmp_path: Path) -> None:
    install(tmp_path)
    code = "try:\n sgl_kernel.fused_moe(1)\nexcept NotImplementedError as e: print(e)"
    lines = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport sgl_kernel\n{code}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", lines], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "sgl_kernel.fused_moe has no CPU stand-in"


def test_the_stand_in_copies_cache_slots_and_assigns_request_slots() -> None:
    from megarl.rollout.sglang_cpu import sgl_kernel_standin as kernel

    layers = [torch.arange(12.0).reshape(4, 3), torch.arange(12.0).reshape(4, 3) * 10]
    addresses = torch.tensor([t.data_ptr() for t in layers])
    kernel.copy_all_layer_kv_cache_cpu(
        addresses, torch.tensor([12, 12]), torch.tensor([0, 1]), torch.tensor([1, 2])
    )
    assert layers[0].tolist() == [[3, 4, 5], [6, 7, 8], [6, 7, 8], [9, 10, 11]]
    assert layers[1].tolist() == [[30, 40, 50], [60, 70, 80], [60, 70, 80], [90, 100, 110]]
    table = torch.zeros(3, 4, dtype=torch.int32)
    kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]),
        torch.tensor([7, 8, 9]), 4,
    )  # fmt: skip
    assert table.tolist() == [[9, 0, 0, 0], [0, 0, 0, 0], [0, 7, 8, 0]]


def test_importing_megarl_rollout_imports_no_engine() -> None:
    heavy = "{'sglang', 'transformers', 'torchvision'}"
    code = f"import sys, megarl.rollout; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
