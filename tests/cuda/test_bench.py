"""The bench of the CUDA kernels: its whole path through the shim, and what it says where no device is."""

import pytest

from benchmarks import SUITE, cuda, cuda_attend
from ctxreuse.cuda import missing
from ctxreuse.errors import ConfigError
from support.shim import Shim

pytestmark = pytest.mark.build("shim")


def test_every_figure_has_its_bound(shim: Shim) -> None:
    figures = cuda.measure(shim, tokens=70, copied=1 << 16, rounds=1)
    assert [figure.metric for figure in figures] == [
        "copy, read and written", "coded planes to pages", "pages to coded planes",
    ]  # fmt: skip
    assert all(figure.value > 0 and (figure.bound or 0) > 0 for figure in figures[1:])
    assert "2." in figures[1].note.split()[0]


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_attention_is_held_against_reading_its_bytes(shim: Shim, format: str) -> None:
    case = cuda_attend.Case(200, 8, format)
    [figure] = cuda_attend.measure(shim, [case], 1e9, cache=1, rounds=1)
    bits = 8 + 32 / 128 if format == "int8" else 4.5
    assert figure.bound == pytest.approx(2 * 4 * 200 * 128 * bits / 8 / 1e9 * 1e6)
    assert figure.value > 0
    assert figure.metric == f"{format} attention, 32/4 x 128, 0k"
    assert figure.bar is None


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxreuse.cuda.launch.find_spec", lambda name: None)
    assert missing() == "cupy is not installed"
    with pytest.raises(ConfigError, match="cupy is not installed"):
        SUITE.run("cuda", quick=True)
