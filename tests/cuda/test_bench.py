"""The bench of the CUDA kernels: its whole path through the shim, and what it says where no device is."""

import pytest

from ctxreuse.bench import cuda
from ctxreuse.bench import run as bench
from ctxreuse.cuda import missing
from ctxreuse.errors import ConfigError
from ctxreuse.testing.shim import Shim


def test_every_figure_has_its_bound(shim: Shim) -> None:
    figures = cuda.measure(shim, streams=2, tokens=70, copied=1 << 16, rounds=1)
    assert [figure.metric for figure in figures] == [
        "copy, read and written", "rANS decode", "rANS encode", "count symbols", "coded planes to pages",
        "pages to coded planes",
    ]  # fmt: skip
    assert all(figure.value > 0 and (figure.bound or 0) > 0 for figure in figures[1:])
    assert "2." in figures[4].note.split()[0]


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxreuse.cuda.launch.find_spec", lambda name: None)
    assert missing() == "cupy is not installed"
    with pytest.raises(ConfigError, match="cupy is not installed"):
        bench("kernels", quick=True, gpu=True)
