"""The numba kernels, in numba's simulator in a process of their own, against numpy."""

import os
import subprocess
import sys

import numpy as np
import pytest

from ctxreuse.cuda import statistics
from ctxreuse.kernels.attention import Part, attend, quantise
from oracle.cuda.attention import decode_int8
from support.waiting import patient

SIMULATED = """
import warnings
warnings.simplefilter("ignore")
import numpy as np
from ctxreuse.cuda import statistics
assert statistics.on_device()
random = np.random.default_rng(0)
logits = (random.standard_normal((3, 150)) * 9).astype(np.float32)
logits[1, 7] = logits[1, 90] = 60
logits[2, :149] = -np.inf
few = logits[:1, :2].copy()
device = [statistics.exit_scores(logits), statistics.exit_scores(few)]
from oracle.cuda.attention import decode_int8
from ctxreuse.kernels.attention import Part, attend, quantise
q = random.standard_normal((2, 1, 16)).astype(np.float32)
k, v = (quantise(random.standard_normal((1, 530, 16)).astype(np.float32), "int8") for _ in range(2))
got, want = decode_int8(q, k, v, scale=0.25), attend(q, [Part(k, v)])
np.testing.assert_allclose(got.o, want.o, atol=1e-4)
np.testing.assert_allclose(got.lse, want.lse, rtol=1e-4)
statistics.on_device.cache_clear()
import os
del os.environ["NUMBA_ENABLE_CUDASIM"]
statistics.on_device = lambda: False
np.testing.assert_allclose(device[0], statistics.exit_scores(logits), rtol=1e-6)
np.testing.assert_allclose(device[1], statistics.exit_scores(few), rtol=1e-6)
print("same", statistics.exit_scores(logits[:0]).shape)
"""


@pytest.mark.slow
def test_kernels_in_the_simulator_equal_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIMULATED],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=patient(200),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "same (0, 3)\n"


def test_numpy_stands_in_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "on_device", lambda: False)
    z = np.array([[0.0, 3.0, 1.0], [2.0, 2.0, -np.inf]], np.float32)
    scores = statistics.exit_scores(z)
    assert scores[:, 0].tolist() == [3, 2]
    assert scores[:, 1].tolist() == [2, 0]
    np.testing.assert_allclose(scores[:, 2], np.log(np.exp(z.astype(np.float64)).sum(1)), rtol=1e-6)


def test_plain_attention_without_a_device_is_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oracle.cuda.attention.on_device", lambda: False)
    random = np.random.default_rng(0)
    q = random.standard_normal((4, 1, 32), np.float32)
    k, v = (quantise(random.standard_normal((2, 9, 32), np.float32), "int8") for _ in range(2))
    want = attend(q, [Part(k, v)], scale=0.5)
    got = decode_int8(q, k, v, scale=0.5)
    assert (got.o == want.o).all()
    for wrong in (k._replace(format="int4"), k.rows(0, 8), quantise(np.zeros((2, 9, 32), np.float32), "fp16")):
        with pytest.raises(ValueError):
            decode_int8(q, wrong, v, scale=0.5)


def test_wrong_arrays_are_refused() -> None:
    x = np.zeros((2, 3), np.float32)
    for call, reason in [
        (lambda: statistics.exit_scores(x.astype(np.float64)), "float32"),
        (lambda: statistics.exit_scores(x[0]), "two axes"),
        (lambda: statistics.exit_scores(x[:, :1]), "two words"),
    ]:
        with pytest.raises(ValueError, match=reason):
            call()
