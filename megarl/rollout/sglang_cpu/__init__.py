"""SGLang on CPU: what PyPI's sglang needs to run on a machine without a GPU.

`python -m megarl.rollout.sglang_cpu install|check|uninstall` manages two things in site-packages,
where the scheduler processes SGLang spawns find them too: an import hook (hook.py) and a stand-in
for the `sgl_kernel` package (sgl_kernel_standin.py). On a CUDA build of torch nothing is installed.
"""

from megarl.rollout.sglang_cpu.install import ShimError, check, install, uninstall

__all__ = ["ShimError", "check", "install", "uninstall"]
