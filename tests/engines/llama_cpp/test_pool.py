"""Contexts share the library's cells, leave them for others, and come back with the same bits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines import open_engine
from ctxreuse.engines.base import Logits
from ctxreuse.engines.llama_cpp import LlamaEngine
from ctxreuse.engines.llama_cpp.cells import LlamaCells, SlotRun
from ctxreuse.engines.llama_cpp.context import LlamaContext
from ctxreuse.engines.llama_cpp.library import LlamaLibrary
from ctxreuse.engines.llama_cpp.state import LlamaState
from ctxreuse.errors import EngineError
from ctxreuse.identity.keys import Tokens
from ctxreuse.testing.engine import random_tokens, resume, seal, views
from support.tiny_gguf import write_tiny_gguf
from support.waiting import patient, until

#: Bytes of K and V of a token of the tiny model.
TOKEN = 3 * 2 * 2 * 16 * 2


def engine_with(file: Path, contexts: int, tokens: int = 1024) -> LlamaEngine:
    """Cells for so many contexts of so many tokens."""
    engine = open_engine(file, threads=1, block_tokens=16, chunk=64, kv_bytes=contexts * tokens * TOKEN)
    assert isinstance(engine, LlamaEngine)
    assert engine.space.token_nbytes == TOKEN
    return engine


@pytest.fixture(scope="module")
def alone(gguf_file: Path) -> LlamaEngine:
    return engine_with(gguf_file, 32)


def started(engine: LlamaEngine, prompts: Sequence[Tokens]) -> list[LlamaContext]:
    found = [engine.new_context() for _ in prompts]
    for context, prompt in zip(found, prompts):
        engine.prefill(context, prompt)
    return found


def check_decoded(
    engine: LlamaEngine, got: Sequence[LlamaContext], alone: LlamaEngine, twins: Sequence[LlamaContext]
) -> None:
    """Decode one token together, and each twin for itself."""
    one = np.array([7], np.int32)
    for logits, twin in zip(engine.step([(context, one) for context in got]), twins):
        expected = alone.prefill(twin, one)
        assert isinstance(logits, np.ndarray)
        assert np.abs(logits - expected).max() <= 5e-3 * np.abs(expected).max()


def test_more_contexts_than_the_cells_hold(gguf_file: Path, alone: LlamaEngine) -> None:
    engine = engine_with(gguf_file, 2)
    prompts = [random_tokens(engine, 40 + 9 * i, seed=i) for i in range(5)]
    contexts, twins = started(engine, prompts), started(alone, prompts)
    for token in np.arange(3, dtype=np.int32):
        for context, twin in zip(contexts, twins):  # each has to leave for the others in every round
            assert np.array_equal(engine.prefill(context, [token]), alone.prefill(twin, [token]))
    assert sum(context.slot >= 0 for context in contexts) == 2
    assert sum(context.nbytes for context in contexts) < 3 * 1024 * TOKEN  # who left takes what its tokens take
    for _ in range(3):
        check_decoded(engine, contexts, alone, twins)
    assert contexts[0].slot < 0
    assert engine.crop(contexts[0], 20)
    alone.crop(twins[0], 20)
    assert np.array_equal(engine.prefill(contexts[0], prompts[1]), alone.prefill(twins[0], prompts[1]))


def test_those_who_compute_become_neighbours(gguf_file: Path, alone: LlamaEngine) -> None:
    engine = engine_with(gguf_file, 8)
    prompts = [random_tokens(engine, 30 + i, seed=i) for i in range(6)]
    contexts, twins = started(engine, prompts), started(alone, prompts)
    check_decoded(engine, contexts, alone, twins)
    by_slot = sorted(zip(contexts, twins), key=lambda pair: pair[0].slot)
    assert [context.slot for context, _ in by_slot] == list(range(6))
    busy, idle = by_slot[::2], by_slot[1::2]
    for _ in range(20):
        check_decoded(engine, [context for context, _ in busy], alone, [twin for _, twin in busy])
    assert sorted(context.slot for context, _ in busy) == [0, 1, 2]
    for context, twin in idle:  # who had to move away has lost nothing
        engine.prefill(context, prompts[0])
        alone.prefill(twin, prompts[0])
        assert np.array_equal(context.tokens, twin.tokens)
    check_decoded(engine, contexts, alone, twins)


def test_no_room_for_a_context_harms_no_other(gguf_file: Path, alone: LlamaEngine) -> None:
    engine = engine_with(gguf_file, 1, 256)
    ids = random_tokens(engine, 250)
    good, long = started(engine, [ids[:100], ids])
    logits, error = engine.step([(good, ids[100:103]), (long, ids[:80])])
    assert isinstance(error, EngineError)
    assert "no room for a context of 330 tokens" in str(error)
    assert "engine.kv_bytes" in str(error)
    twin, other = started(alone, [ids[:100], ids])
    assert np.array_equal(logits, alone.prefill(twin, ids[100:103]))
    with pytest.raises(EngineError, match="no room"):
        engine.prefill(long, ids[:20])
    assert long.n == 250
    assert np.array_equal(engine.prefill(long, ids[:3]), alone.prefill(other, ids[:3]))  # what fits still goes on


def test_released_contexts_return_their_cells(gguf_file: Path) -> None:
    engine = engine_with(gguf_file, 2)
    (first,) = started(engine, [random_tokens(engine, 5)])
    for seed in range(6):
        started(engine, [random_tokens(engine, 5, seed=seed)])
        gc.collect()
        assert first.slot >= 0  # nobody made it leave


def test_threads_that_push_each_other_out(gguf_file: Path, alone: LlamaEngine) -> None:
    engine = engine_with(gguf_file, 2)
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            for round_ in range(6):
                ids = random_tokens(engine, 80 + seed, seed=10 * seed + round_)
                sealed = seal(engine, ids[:64])
                _, got = resume(engine, sealed, 64, ids[64:])
                if not np.array_equal(got, expected[seed, round_]):
                    wrong.append((seed, round_))
        except Exception as error:
            wrong.append(error)

    expected = {}
    for seed in range(4):
        for round_ in range(6):
            ids = random_tokens(alone, 80 + seed, seed=10 * seed + round_)
            expected[seed, round_] = alone.prefill(alone.new_context(), ids)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_rows_are_read_before_the_next_pass(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an answer that ends would wait for its export as long as others compute without a pause."""
    engine = engine_with(gguf_file, 4)
    one, two = started(engine, [random_tokens(engine, 40, seed=i) for i in range(2)])
    running, go_on, events = threading.Event(), threading.Event(), list[str]()
    pool, cells = engine._pool, engine._pool._cells
    assert cells is not None
    decode, state = cells.decode, cells.state

    def slow(runs: Sequence[SlotRun]) -> list[Logits]:
        events.append("pass")
        running.set()
        assert go_on.wait(patient(60))
        return decode(runs)

    def noted(slot: int, **how: Any) -> Any:
        events.append("read")
        return state(slot, **how)

    monkeypatch.setattr(cells, "decode", slow)
    monkeypatch.setattr(cells, "state", noted)
    passes = threading.Thread(target=lambda: [engine.prefill(one, [token]) for token in range(20)])
    passes.start()
    assert running.wait(patient(60))
    reads = threading.Thread(target=pool.read, args=(two,))
    reads.start()
    until(lambda: pool._readers == 1)
    go_on.set()
    for thread in (passes, reads):
        thread.join(patient(60))
    assert events == ["pass", "read", *["pass"] * 19]
    assert pool._readers == 0


def test_windows_that_leave_the_cells_in_mid_prompt_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps the rows of a window in a ring: they are not by position when it has gone round."""
    file, entered = write_tiny_gguf(tmp_path / "tiny.gguf", window=100), list[bool]()
    engine, alone = (open_engine(file, threads=1, block_tokens=16, chunk=64, kv_bytes=n * 1024 * 128) for n in (2, 32))
    as_sequence = LlamaState.as_sequence

    def noted(rows: LlamaState, *place: int) -> LlamaState:
        entered.append(any(order is not None for order in rows._orders))
        return as_sequence(rows, *place)

    monkeypatch.setattr(LlamaState, "as_sequence", noted)
    prompts = [random_tokens(alone, 700, seed=seed) for seed in range(3)]
    twins, got = ([which.new_context() for _ in prompts] for which in (alone, engine))
    expected = [alone.prefill(twin, prompt) for twin, prompt in zip(twins, prompts)]
    found = dict[int, Any]()
    while len(found) < len(prompts):
        for i, (one, prompt) in enumerate(zip(got, prompts)):
            for _ in range(3):  # slices, so that the ring goes round between leaving and leaving
                if i not in found:
                    (logits,) = engine.step([(one, prompt[one.n :])], limit=64)
                    found |= {i: logits} if logits is not None else {}
    assert any(entered)
    assert not all(entered)
    for i, logits in found.items():
        assert np.abs(logits - expected[i]).max() <= 5e-3 * np.abs(expected[i]).max()


def exported(engine: LlamaEngine, context: LlamaContext, first: int, count: int) -> list[bytes]:
    keys = [bytes([1 + first + i]) * 32 for i in range(count)]
    return [data.tobytes() for data in engine.export(context, keys, bytes([first]) * 32, first)]


@pytest.mark.parametrize("window", [0, 24])
def test_rows_that_are_read_in_place_are_those_of_the_state(tmp_path: Path, window: int) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf", window=window)
    engine = open_engine(
        file, threads=1, block_tokens=16, chunk=64, kv_bytes=2 * 512 * (TOKEN // 3 if window else TOKEN)
    )
    assert isinstance(engine, LlamaEngine)
    pool, chance = engine._pool, np.random.default_rng(window)
    contexts = started(engine, [random_tokens(engine, 30, seed=i) for i in range(3)])
    in_cells, layers = 0, engine._state.caches[0].k
    for step in range(150):
        one = contexts[chance.integers(3)]
        if one.n > 300 or (not window and chance.random() < 0.3):
            assert engine.crop(one, 0 if window else int(chance.integers(one.n)))
        if one.n == 0 or chance.random() < 0.7:
            engine.prefill(one, random_tokens(engine, int(chance.integers(1, 60)), seed=step))
        start, end = sorted(chance.integers(0, one.n + 1, 2).tolist())
        found, state = pool.read_rows(one, start, end), pool.read(one)
        assert len(found) == 2 * len(layers)
        for at, rows in found.items():
            assert np.array_equal(rows, state.by_position(*at)[start:end])
        in_cells += one.rows is None
    assert pool._cell_rows is not None
    assert in_cells > 50


def test_the_end_of_a_context_is_exported_without_the_rows_before_it(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(gguf_file, 2)
    (context,) = started(engine, [random_tokens(engine, 80)])
    expected, cells = exported(engine, context, 0, 5), engine._pool._cells
    assert cells is not None

    def whole(slot: int, **how: Any) -> Any:
        raise AssertionError("the whole context is copied")

    monkeypatch.setattr(cells, "state", whole)
    assert exported(engine, context, 4, 1) == expected[4:]


def test_a_context_is_exported_after_the_first_pass_of_larger_cells_failed(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(gguf_file, 2, 2048)
    (context,) = started(engine, [random_tokens(engine, 1000)])
    expected, cells = exported(engine, context, 58, 4), engine._pool._cells

    def failing(cells: LlamaCells, runs: Sequence[SlotRun]) -> list[Logits]:
        raise EngineError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(LlamaCells, "decode", failing)
        with pytest.raises(EngineError, match="no memory"):
            engine.prefill(context, random_tokens(engine, 60, seed=1))
    assert engine._pool._cells is not cells
    assert context.slot >= 0
    assert exported(engine, context, 58, 4) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_cells_are_made_while_a_context_is_loaded(
    gguf_file: Path, alone: LlamaEngine, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    ids, make, loaded, makers = random_tokens(alone, 70), LlamaCells.__init__, threading.Event(), list[bool]()
    sealed, engine = seal(alone, ids), engine_with(gguf_file, 4)
    _, expected = resume(alone, sealed, 64, ids[64:])

    def recorded(cells: LlamaCells, *args: Any, **options: Any) -> None:
        makers.append(threading.current_thread() is threading.main_thread())
        if not makers[-1]:
            assert loaded.wait(patient(60)), "loads wait for the cells"
            if fails:
                raise EngineError("no memory")
        make(cells, *args, **options)

    monkeypatch.setattr(LlamaCells, "__init__", recorded)
    contexts = [engine.new_context(), engine.new_context()]
    for context in contexts:
        engine.load(context, *views(engine, sealed, 64)).wait()
    loaded.set()
    for context in contexts:
        assert np.array_equal(engine.prefill(context, ids[64:]), expected)
    assert makers == ([False] * 3 + [True] if fails else [False])  # of 4, 2 and 1 streams, before the pass tries again


def test_a_load_waits_for_one_pass_at_most(
    gguf_file: Path, alone: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, decode, held, passing = random_tokens(alone, 70), LlamaCells.decode, threading.Event(), threading.Event()
    engine, sealed = engine_with(gguf_file, 4), seal(alone, ids)
    (other,) = started(engine, [ids[:20]])
    taken = list[str]()

    class Watched:
        """The pool's lock, and who takes it."""

        def __init__(self, lock: Any) -> None:
            self._lock = lock

        def __enter__(self) -> Any:
            taken.append(threading.current_thread().name)
            return self._lock.__enter__()

        def __exit__(self, *error: Any) -> Any:
            return self._lock.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._lock, name)

    engine._pool._lock = Watched(engine._pool._lock)  # type: ignore[assignment]
    loader = threading.Thread(
        target=lambda: engine.load(engine.new_context(), *views(engine, sealed, 64)).wait(), name="loader"
    )

    def slow(cells: LlamaCells, runs: Sequence[SlotRun]) -> list[Logits]:
        passing.set()
        assert held.wait(patient(60))
        return decode(cells, runs)

    monkeypatch.setattr(LlamaCells, "decode", slow)
    computing = threading.Thread(target=engine.prefill, args=(other, ids[:1]))
    computing.start()
    assert passing.wait(patient(60))
    loader.start()
    held.set()
    for thread in (computing, loader):
        thread.join(patient(60))
    assert taken.count("loader") == 1


@pytest.mark.parametrize(("contexts", "made"), [(8, [(2048, 4)]), (4, [(1280, 3), (1536, 2)])])
def test_cells_have_room_for_a_prompt_and_what_follows_it(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, contexts: int, made: list[tuple[int, int]]
) -> None:
    sizes, make = list[tuple[int, int]](), LlamaCells.__init__
    engine = engine_with(gguf_file, contexts)

    def recorded(cells: LlamaCells, model: Any, each: int, streams: int, *args: Any, **options: Any) -> None:
        sizes.append((each, streams))
        make(cells, model, each, streams, *args, **options)

    monkeypatch.setattr(LlamaCells, "__init__", recorded)
    context = engine.new_context(1200)
    engine.prefill(context, random_tokens(engine, 1100))
    for turn in range(4):
        engine.prefill(context, random_tokens(engine, 60, seed=turn))
    assert sizes == made


@pytest.fixture
def silent_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not say where the cache is."""
    monkeypatch.setattr(LlamaLibrary, "places", lambda self: None)


def test_the_callback_changes_no_numbers(alone: LlamaEngine, gguf_file: Path, silent_library: None) -> None:
    silent, ids = engine_with(gguf_file, 32), random_tokens(alone, 80)
    assert silent._pool._cell_rows is None
    assert alone._pool._cell_rows is not None
    (one,), (two,) = started(alone, [ids]), started(silent, [ids])
    assert exported(alone, one, 0, 5) == exported(silent, two, 0, 5)
    for token in range(5):
        ids = np.array([token], np.int32)
        assert np.array_equal(alone.prefill(one, ids), silent.prefill(two, ids))


def test_where_rows_cannot_be_read_an_export_in_several_calls_copies_them_once(
    gguf_file: Path, silent_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(gguf_file, 2)
    pool, copies = engine._pool, list[int]()
    (context,) = started(engine, [random_tokens(engine, 80)])
    cells = pool._cells
    assert cells is not None
    state = cells.state
    monkeypatch.setattr(cells, "state", lambda slot, **how: copies.append(slot) or state(slot, **how))
    whole = exported(engine, context, 0, 5)
    assert exported(engine, context, 0, 2) + exported(engine, context, 2, 3) == whole
    assert len(copies) == 1
    # Other tokens at the same length: nothing of the copy is taken for theirs.
    engine.crop(context, 64)
    engine.prefill(context, random_tokens(engine, 16, seed=1))
    assert exported(engine, context, 0, 4) == whole[:4]
    assert exported(engine, context, 4, 1) != whole[4:]
    assert len(copies) == 2
    until(lambda: pool._copied is None)  # it takes memory for a second
