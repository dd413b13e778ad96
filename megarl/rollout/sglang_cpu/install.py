"""Puts the hook and the sgl_kernel stand-in into site-packages, checks them, and takes them out
again.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

__all__ = ["HOOK_NAME", "ShimError", "check", "install", "uninstall"]

HOOK_NAME = "_megarl_sglang_cpu"
_HERE = Path(__file__).parent
_MARK = "IS_MEGARL_STANDIN"


class ShimError(RuntimeError):
    """The shim cannot be installed here or is not installed as it should be."""


def _files(site: Path) -> dict[Path, str]:
    """Every file the shim puts into `site`, and its text."""
    return {
        site / f"{HOOK_NAME}.py": (_HERE / "hook.py").read_text(),
        site / f"{HOOK_NAME}.pth": f"import {HOOK_NAME}\n",
        site / "sgl_kernel" / "__init__.py": (_HERE / "sgl_kernel_standin.py").read_text(),
    }


def _site(target: Path | None) -> Path:
    return target if target is not None else Path(sysconfig.get_paths()["purelib"])


def _torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None or torch.version.hip is not None


def _is_real_sgl_kernel(site: Path) -> bool:
    package = site / "sgl_kernel"
    if not package.exists():
        return False
    init = package / "__init__.py"
    return not (init.exists() and _MARK in init.read_text(errors="replace"))


def install(target: Path | None = None) -> str:
    """Install or refresh the shim; running it twice changes nothing.

    Args:
        target: site-packages folder; None: this interpreter's.

    Returns:
        One sentence saying what was done.

    Raises:
        ShimError: a real sgl_kernel is installed and would be overwritten.
    """
    site = _site(target)
    if _torch_has_cuda():
        return "nothing to do: this torch is a CUDA build, SGLang runs on it without the shim"
    if _is_real_sgl_kernel(site):
        raise ShimError(
            f"{site / 'sgl_kernel'} is a real sgl_kernel and is not overwritten; uninstall it "
            "(pip uninstall sgl-kernel) to run SGLang on CPU with the stand-in"
        )
    stale = {path: text for path, text in _files(site).items() if _text(path) != text}
    for path, text in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"installed into {site}" if stale else f"already installed in {site}"


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def check(target: Path | None = None) -> str:
    """Verify that the installed files are this version's.

    Raises:
        ShimError: a file is missing or differs; the message names it and the remedy.
    """
    site = _site(target)
    if _torch_has_cuda():
        return "not needed: this torch is a CUDA build"
    for path, text in _files(site).items():
        if _text(path) != text:
            state = "is missing" if not path.exists() else "is not this version's"
            raise ShimError(f"{path} {state}; run `python -m megarl.rollout.sglang_cpu install`")
    return f"installed in {site}"


def uninstall(target: Path | None = None) -> str:
    """Remove what `install` wrote; a real sgl_kernel is left alone."""
    site = _site(target)
    removed = 0
    for path in _files(site):
        if path.name == "__init__.py" and _is_real_sgl_kernel(site):
            continue
        if path.exists():
            path.unlink()
            removed += 1
    package = site / "sgl_kernel"
    if package.exists() and not _is_leftover(package):
        return f"removed {removed} files from {site}"
    if package.exists():
        for cached in package.glob("__pycache__/*"):
            cached.unlink()
        for folder in (package / "__pycache__", package):
            if folder.exists():
                folder.rmdir()
    return f"removed {removed} files from {site}"


def _is_leftover(package: Path) -> bool:
    """Only byte code is left in it."""
    return all(child.name == "__pycache__" for child in package.iterdir())
