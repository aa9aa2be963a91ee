"""Which table is used: the best one, or the one CTXREUSE_KERNELS names; a name that cannot run fails the import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctxreuse import _native, kernels

PRINT = "from ctxreuse import kernels; print(kernels.active(), *kernels.available())"


def _python(code: str, name: str | None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "CTXREUSE_KERNELS"}
    if name is not None:
        env["CTXREUSE_KERNELS"] = name
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", [None, ""])
def test_the_best_table_is_chosen(name: str | None) -> None:
    done = _python(PRINT, name)
    assert done.stdout.split() == [_native.kernels()[0], *_native.kernels()], done.stderr


@pytest.mark.parametrize("name", _native.kernels())
def test_a_table_can_be_forced(name: str) -> None:
    assert _python(PRINT, name).stdout.split() == [name, *_native.kernels()]


def test_numpy_can_be_forced_and_works() -> None:
    code = (
        PRINT
        + "; import numpy as np; a = np.zeros((1, 2, 4), np.float16)"
        + "; kernels.copy3(a, np.ones((1, 2, 4), np.float32), a.shape, dst_dtype='fp16', src_dtype='fp32')"
        + "; print(a.sum()); kernels.use('numpy'); kernels.use('avx2')"
    )
    done = _python(code, "numpy")
    assert done.stdout.split() == ["numpy", "numpy", "8.0"]
    assert "ValueError: kernel table 'avx2' is not usable: the native extension is not built" in done.stderr


def test_without_the_extension_numpy_stands_in(tmp_path: Path) -> None:
    package = Path(kernels.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # An editable install finds the package before sys.path is asked; its finder has to go.
    hide = "sys.meta_path[:] = [f for f in sys.meta_path if 'Redirect' not in type(f).__name__]; "
    done = _python(f"import sys; {hide}sys.path.insert(0, {str(tmp_path)!r}); {PRINT}; print(kernels.__file__)", None)
    assert done.stdout.split() == ["numpy", "numpy", str(tmp_path / package.name / "kernels" / "__init__.py")], (
        done.stderr
    )


@pytest.mark.parametrize("name", ["sse9", "AVX2", "generic ", "neon" if "neon" not in _native.kernels() else "avx2"])
def test_an_unusable_name_fails_the_import(name: str) -> None:
    done = _python(PRINT, name)
    assert done.returncode != 0
    assert f"ImportError: CTXREUSE_KERNELS={name} names no kernel table that runs on this machine" in done.stderr
    assert "generic, avx2, avx512, neon" in done.stderr


def test_switching() -> None:
    before = kernels.active()
    for name in kernels.available():
        kernels.use(name)
        assert kernels.active() == name
    kernels.use(before)
    for wrong in ("nonesuch", "", "generic\0"):
        with pytest.raises(ValueError, match="not usable on this machine"):
            _native.use(wrong)
    with pytest.raises(TypeError):
        _native.use(3)  # type: ignore[arg-type]
    assert kernels.active() == before
