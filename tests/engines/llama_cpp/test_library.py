"""What a GGUF file and a library may be: text, restarts after SIGKILL, files and builds that are refused."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ctxreuse import LLM
from ctxreuse.block.format import parse
from ctxreuse.config import EngineConfig
from ctxreuse.engines import open_engine
from ctxreuse.engines.llama_cpp.cells import LlamaCells, SlotRun
from ctxreuse.engines.llama_cpp.library import LlamaLibrary, LlamaModel
from ctxreuse.engines.llama_cpp.state import LlamaState, StateLayout
from ctxreuse.engines.text import Message
from ctxreuse.errors import ConfigError, CtxReuseError, EngineError, FormatError
from support.tiny_gguf import write_tiny_gguf

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8

OPENER = """
import os, sys
from ctxreuse.engines.llama_cpp.library import LlamaLibrary
LlamaLibrary.open("")
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
"""
WRITER = """
import os, signal, sys
from ctxreuse import LLM
from ctxreuse.block.format import parse
llm = LLM(sys.argv[1], store=sys.argv[2], threads=1)
print(llm.generate(sys.argv[3], max_tokens=8, ignore_eos=True).tokens, flush=True)
llm.store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_context_outlives_a_killed_process(gguf_file: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", WRITER, str(gguf_file), str(tmp_path / "store"), PROMPT]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stderr == ""  # llama.cpp's own messages go to the log
    with LLM(gguf_file, store=tmp_path / "store", threads=1) as llm:
        again = llm.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert str(again.tokens) == done.stdout.strip()
    assert again.usage.tokens.cached >= len(PROMPT) // 64 * 64 - 64
    with LLM(gguf_file, threads=1, engine="llama_cpp") as llm:
        assert llm.generate(PROMPT, max_tokens=8, ignore_eos=True).tokens == again.tokens


@pytest.mark.parametrize(
    ("chosen", "spins", "policy"), [({}, "1000", "ACTIVE"), ({"GOMP_SPINCOUNT": "7"}, "7", "PASSIVE")]
)
def test_threads_of_the_library_spin_shortly_unless_the_user_chose(
    chosen: dict[str, str], spins: str, policy: str
) -> None:
    rest = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    env = rest | chosen | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([sys.executable, "-c", OPENER], env=env, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr  # as libgomp took it
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr, "else it does not spin where two threads compute"
    assert done.stdout.split() == [str(chosen.get("GOMP_SPINCOUNT")), "None"]


def test_what_follows_whole_blocks_has_the_bits_of_a_full_prefill(gguf_file: Path) -> None:
    engine = open_engine(gguf_file, threads=2, chunk=256)
    ids = np.random.default_rng(3).integers(0, 256, 660).astype(np.int32)
    whole = engine.prefill(engine.new_context(), ids)
    for begun in (64, 320, 512, 640):
        context = engine.new_context()
        engine.prefill(context, ids[:begun])
        assert np.array_equal(engine.prefill(context, ids[begun:]), whole), begun
    context = engine.new_context()
    engine.prefill(context, ids)
    assert engine.crop(context, 659)  # a prompt that is there but for the token whose logits are wanted
    assert np.array_equal(engine.prefill(context, ids[659:]), whole)
    assert context.n == 660
    context, logits = engine.new_context(), None
    while logits is None:  # in slices, as beside other requests
        (logits,) = engine.step([(context, ids[context.n :])], limit=100)
    assert np.array_equal(logits, whole)


def test_text_is_that_of_the_file(gguf_file: Path) -> None:
    text = open_engine(gguf_file, threads=1).text
    assert text is not None
    assert text.stop_ids == {257}
    assert text.markers == {"<|im_start|>", "<|im_end|>"}
    said = "<|im_start|>né\n 12"
    assert text.encode(said)[0] == 256
    assert len(text.encode(said)) == 1 + len("né\n 12".encode())
    assert 256 not in text.encode(said, markers=False)
    assert text.decode(text.encode(said)) == "né\n 12"
    assert text.decode(text.encode(said, markers=False)) == said
    assert len(text.encode("")) == 0
    prompt = text.render([Message("user", "hi")], generate=True)
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(EngineError, match="surrogates"):
        text.encode("\ud800")


def test_another_file_or_setting_of_blocks_is_another_space(gguf_file: Path, tmp_path: Path) -> None:
    spaces = [open_engine(gguf_file, threads=1).space, open_engine(gguf_file, threads=1, block_tokens=16).space]
    spaces.append(open_engine(write_tiny_gguf(tmp_path / "tiny.gguf", seed=8), threads=1).space)
    assert len({space.digest for space in spaces}) == 3
    assert open_engine(shutil.copy(gguf_file, tmp_path / "copy.gguf"), threads=1).space == spaces[0]


def test_windows_are_states_of_the_last_positions(tmp_path: Path) -> None:
    engine = open_engine(write_tiny_gguf(tmp_path / "windows.gguf", window=16), threads=1, block_tokens=16)
    assert [layer.kind for layer in engine.space.layers] == ["full"] + 6 * ["sliding"]
    context = engine.new_context()
    engine.prefill(context, np.arange(70, dtype=np.int32))
    assert context.states == (64,)
    view = parse(engine.export_state(context, b"k" * 32, b"p" * 32, 64))
    assert {plane.shape for plane in view.layout.planes} == {(2, 15, 16)}
    assert {plane.layer for plane in view.layout.planes} == set(range(1, 7))
    assert not engine.crop(context, 60)
    assert context.n == 70


def test_what_is_no_model_or_library_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        open_engine(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(FormatError, match="GGUF"):
        open_engine(tmp_path / "text.gguf")
    with pytest.raises(ConfigError, match="no such engine"):
        open_engine(gguf_file, engine="gguf")
    with pytest.raises(ConfigError, match=r"engine\.library"):
        open_engine(gguf_file, library=str(tmp_path / "none.so"))
    with pytest.raises(ConfigError, match="cannot be used"):
        open_engine(gguf_file, library=str(tmp_path / "text.gguf"))


def test_a_truncated_file_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    data, rng = gguf_file.read_bytes(), random.Random(5)
    for cut in (*(rng.randrange(8, len(data) - 1) for _ in range(20)), len(data) - 1):
        (tmp_path / "cut.gguf").write_bytes(data[:cut])
        with pytest.raises(CtxReuseError):
            open_engine(tmp_path / "cut.gguf", threads=1)


def test_a_vocabulary_with_a_doubled_entry_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    """llama.cpp ends the process for it."""
    data = bytearray(gguf_file.read_bytes())
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4 + 4 + 8
    entries = []
    for _ in range(300):
        length = int.from_bytes(data[at : at + 8], "little")
        entries.append((at + 8, length))
        at += 8 + length
    first = next(one for one in entries if sum(length == one[1] for _, length in entries) > 1)
    second = next(one for one in entries if one[1] == first[1] and one != first)
    data[second[0] : sum(second)] = data[first[0] : sum(first)]
    (tmp_path / "doubled.gguf").write_bytes(data)
    with pytest.raises(FormatError, match=r"tokenizer\.ggml\.tokens was there before"):
        open_engine(tmp_path / "doubled.gguf")
    data[first[0]] = 0  # the library's strings end there
    (tmp_path / "doubled.gguf").write_bytes(data)
    with pytest.raises(FormatError, match=r"tokenizer\.ggml\.tokens holds a NUL"):
        open_engine(tmp_path / "doubled.gguf")


HOSTILE = """
import random, sys
from pathlib import Path
import numpy as np
from ctxreuse.engines import open_engine
from ctxreuse.errors import CtxReuseError
data, rng = Path(sys.argv[1]).read_bytes(), random.Random(11)
names = data.index(b"tokenizer.ggml.tokens"), data.index(b"tokenizer.ggml.token_type")
head = [*range(4, names[0]), *range(names[1], data.index(b"blk.2.ffn_down.weight") + 60)]
refused = 0
for _ in range(60):
    changed = bytearray(data)
    for place in rng.choices(head, k=2):
        changed[place] = rng.choice((0, 1, 128, 255))
    Path(sys.argv[2]).write_bytes(changed)
    try:
        engine = open_engine(sys.argv[2], threads=1)
        engine.prefill(engine.new_context(), np.arange(5, dtype=np.int32))
    except CtxReuseError:
        refused += 1
print(refused)
"""


def test_a_hostile_head_ends_no_process(gguf_file: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", HOSTILE, str(gguf_file), str(tmp_path / "hostile.gguf")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 20 < int(done.stdout) < 60


def test_an_unknown_architecture_is_refused_by_name(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(gguf_file.read_bytes().replace(b"llama", b"lhama"))
    with pytest.raises(EngineError, match=r"lhama"):
        open_engine(tmp_path / "odd.gguf", threads=1)


def test_a_file_swapped_under_the_same_name_has_a_space_of_its_own(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    with LLM(file, store=tmp_path / "store", threads=1) as llm:
        llm.generate(PROMPT, max_tokens=2, ignore_eos=True)
        old = llm.engine.space
        write_tiny_gguf(tmp_path / "other.gguf", seed=8).replace(file)
        again = llm.generate(PROMPT, max_tokens=2, ignore_eos=True)
        assert again.usage.tokens.cached > 0  # the open model is the old file still
    with LLM(file, store=tmp_path / "store", threads=1) as llm:
        assert llm.engine.space != old
        assert llm.generate(PROMPT, max_tokens=2, ignore_eos=True).usage.tokens.cached == 0


def test_an_answer_ends_where_the_positions_end(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "short.gguf", positions=256)
    with LLM(file, threads=1) as llm:
        prompt = PROMPT[:250]
        done = llm.generate(prompt, max_tokens=50, ignore_eos=True)
        assert 0 < len(done.tokens) <= 256 - len(prompt) + 1
        with pytest.raises(CtxReuseError, match="the model takes 256"):
            llm.generate(PROMPT, max_tokens=1)


def test_a_state_that_is_not_understood_is_refused(gguf_file: Path) -> None:
    cells = LlamaCells(LlamaModel(LlamaLibrary.open(""), gguf_file), 5, 1, 8, 1)
    cells.decode([SlotRun(0, 0, np.arange(5, dtype=np.int32))])
    data = cells.state(0)
    layout = StateLayout.learn(data, 5)
    assert layout.nbytes(5) == data.nbytes
    assert np.array_equal(LlamaState(layout, 5, data).rows(0, "k").shape, (5, 32))
    for at, value in ((8, 2), (12, 4), (8 + 8 + 5 * 12, 1), (8 + 8 + 4, 9)):
        other = data.copy()
        other[at : at + 4] = np.frombuffer(np.int32(value).tobytes(), np.uint8)
        with pytest.raises(FormatError, match="not understood"):
            StateLayout.learn(other, 5)
    with pytest.raises(FormatError, match="not understood"):
        StateLayout.learn(data[:-4], 5)
    with pytest.raises(EngineError, match="refuses"):
        cells.restore(0, data[:-4].copy())


def test_a_build_whose_parameters_lie_elsewhere_is_refused(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaLibrary, "params", lambda library, *_: library.calls.llama_context_default_params())
    with pytest.raises(EngineError, match="in another form"):
        open_engine(EngineConfig(str(gguf_file), threads=1))
