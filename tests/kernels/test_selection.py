"""Which table is used: the best one, or the one CTXREUSE_KERNELS names; a name that cannot run fails the import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctxreuse import _native, kernels
from support.waiting import patient

PRINT = "from ctxreuse import kernels; print(kernels.active(), *kernels.available())"


def _python(code: str, name: str | None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "CTXREUSE_KERNELS"}
    if name is not None:
        env["CTXREUSE_KERNELS"] = name
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=patient(60))


@pytest.mark.parametrize("name", [None, ""])
def test_the_best_table_is_chosen(name: str | None) -> None:
    done = _python(PRINT, name)
    assert done.stdout.split() == [_native.kernels()[0], *_native.kernels()], done.stderr


@pytest.mark.parametrize("name", _native.kernels())
def test_a_table_can_be_forced(name: str) -> None:
    assert _python(PRINT, name).stdout.split() == [name, *_native.kernels()]


@pytest.mark.parametrize("module", ["kernels", "store", "runtime"])
def test_without_the_extension_one_message_says_what_to_do(module: str, tmp_path: Path) -> None:
    package = Path(kernels.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # An editable install finds the package before sys.path is asked; its finder has to go.
    hide = "sys.meta_path[:] = [f for f in sys.meta_path if 'Redirect' not in type(f).__name__]; "
    done = _python(f"import sys; {hide}sys.path.insert(0, {str(tmp_path)!r}); import ctxreuse.{module}", None)
    assert (
        "ImportError: the native extension ctxreuse._native is not built. Install ctxreuse from a wheel" in done.stderr
    )


FOREIGN = "avx2" if "neon" in _native.kernels() else "neon"


@pytest.mark.parametrize("name", ["sse9", "AVX2", "generic ", "numpy", FOREIGN])
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
