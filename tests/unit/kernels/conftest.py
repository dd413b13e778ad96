"""Backends that run in this process: `backend` names each of them through MEGARL_KERNELS."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MEGARL_KERNELS", request.param)
    return request.param
