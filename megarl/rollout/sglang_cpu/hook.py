"""Import hook that lets PyPI's SGLang run on a torch without CUDA.

`install` copies this file into site-packages, where a .pth line imports it at every Python start,
so it must stand alone and cost nothing: it only puts a finder on sys.meta_path that looks at three
module names.
With a CUDA torch it removes itself the first time one of them is imported.

* sglang: SGLANG_USE_CPU_ENGINE=1 unless set. SGLang otherwise looks for GPU kernels.
* torchvision: PyPI's wheel links CUDA libraries, so its operators never load and importing it fails
  on an undeclared torchvision::nms. The two operators needed at import are declared, not
  implemented.
* sglang...pool_host.common: host buffers are pinned through the CUDA runtime; on CPU plain memory
  is used.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing is not imported at every start for its sake
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_POOL_HOST = "sglang.srt.mem_cache.pool_host.common"
_NAMES = frozenset({"sglang", "torchvision", _POOL_HOST})


def _torch_has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None or torch.version.hip is not None


def _is_cuda_linked(spec: ModuleSpec) -> bool:
    """Whether torchvision's operator library needs CUDA libraries (they cannot be loaded here)."""
    import os

    for folder in spec.submodule_search_locations or ():
        library = os.path.join(folder, "_C.so")
        if os.path.exists(library):
            with open(library, "rb") as f:
                return b"libtorch_cuda" in f.read()
    return False


def _declare_torchvision_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if hasattr(torch.ops.torchvision, name):
            continue
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    vars(sys.modules[__name__])["_library"] = (
        library  # a collected Library takes its operators with it
    )


def _allocate(dims: Any, dtype: Any, device: str = "cpu", **_: Any) -> Any:
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


class _Finder:
    """Acts once per name, just before (torchvision, sglang) or after (pool_host) it runs."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _NAMES or name in self.seen:
            return None
        self.seen.add(name)
        if _torch_has_cuda():
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            return None
        import importlib.util
        import os

        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        if name == "sglang":
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        elif name == "torchvision":
            if _is_cuda_linked(spec):
                _declare_torchvision_operators()
        else:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                vars(module)["ALLOC_MEMORY_FUNCS"]["cpu"] = _allocate

            loader.exec_module = exec_module
        return spec


if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
