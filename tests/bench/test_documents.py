"""Benches of reuse at other positions: their corpora, their archive on a tiny model, and what they make of numbers."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks import chunks, decay, qa
from benchmarks.archive import Archive, cut_to
from benchmarks.corpus import facts, long_texts, pool, questions
from ctxreuse.calibrate.cases import KINDS
from ctxreuse.calibrate.chunk_trial import PolicyOutcome
from ctxreuse.codec import model_digest
from ctxreuse.engines.calibration import Fidelity
from ctxreuse.errors import ConfigError
from ctxreuse.reuse import ChunkProfile, PolicyMeasurement
from ctxreuse.store import BlockStore


@pytest.fixture(scope="module")
def archive(engine_of: Any, tmp_path_factory: Any) -> Iterator[Archive]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from ctxreuse.engines.text import HFText
    from ctxreuse.engines.torch_hf import TorchEngine

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    engine = TorchEngine(engine_of("llama").model, HFText(tokenizer), block_tokens=16)
    row = PolicyMeasurement(
        "rotate", "behind", 4, 192, kl=0.01, kl_high=0.02, top1=0.9, dnll=0.0, recomputed=0.0, windows=4
    )
    card = ChunkProfile(model_digest(engine.space), 1, {"behind": 1e9}, (row,))
    with BlockStore.open(tmp_path_factory.mktemp("archive")) as store:
        made = Archive(engine, store, card)
        yield made
        made.runtime.close()


def test_documents_are_reused_in_another_order(archive: Archive) -> None:
    documents = [document[:300] for document in facts(3).documents]
    first = archive.ask(archive.encode_prompt(documents, "What now?"), None)
    assert first.done.usage.cached_tokens == 0
    archive.keep(first.done)
    turned = archive.encode_prompt(documents[::-1], "What now?")
    exact = archive.ask(turned, None).done.usage
    assert exact.tokens.relocated == 0
    loose = archive.ask(turned, 0.05).done.usage
    assert loose.tokens.relocated > 0.8 * sum(len(archive.text.encode(document)) for document in documents)
    assert loose.cached_tokens == exact.cached_tokens + loose.tokens.relocated
    assert loose.gate_decision.startswith("kl-0.020 by rotate")
    assert archive.ask(turned, 0.01).done.usage.tokens.relocated == 0


def test_a_document_has_the_same_ids_wherever_it_stands(archive: Archive) -> None:
    one, two = (document[:300] for document in facts(2).documents)
    found = []
    for pair in ((one, two), (two, one)):
        prompted = archive.encode_prompt(pair, "Who?")
        ends = (0, *prompted.parts, len(prompted.ids))
        found.append({archive.text.decode(prompted.ids[a:b].tolist()) for a, b in pairwise(ends)})
    assert found[0] == found[1] >= {f"{one}\n\n", f"{two}\n\n"}


def test_reuse_does_not_decay(archive: Archive) -> None:
    documents = [document[:200] for document in facts(12).documents[4:]]

    class Silent:
        def step(self, *_: object) -> None: ...

    asked = decay._asked(archive, documents, 24, 3, Silent())  # type: ignore[arg-type]
    rate = [sum(q.reused for q in some) / sum(q.tokens for q in some) for some in (asked[8:16], asked[16:])]
    assert rate[1] > 0.97 * rate[0] > 0.8
    assert sum(query.prefix for query in asked[8:]) < 0.6 * sum(query.reused for query in asked[8:])


def query(reused: int, seconds: float) -> decay.Query:
    return decay.Query(tokens=100, reused=reused, moved=reused, prefix=10, seconds=seconds)


def test_decay_is_seen() -> None:
    flat = [query(0, 5.0)] * 2 + [query(80, 1.0)] * 6
    figures = {f.metric: f for f in decay.figures(flat, 2, "made up", bars=True)}
    assert figures["reused, questions 1 to 2"].value == 0
    assert figures["reused, questions 7 to 8"].value == 80
    assert figures["reused, questions 7 to 8"].baseline == 10
    last = [figures[f"{what}, last window over the first after warm-up"] for what in ("reuse", "first token")]
    assert [figure.passed for figure in last] == [True, True]
    worse = [*flat[:-2], query(70, 1.2), query(70, 1.2)]
    last = decay.figures(worse, 2, "made up", bars=True)[-2:]
    assert [figure.passed for figure in last] == [False, False]
    assert [round(figure.value, 3) for figure in last] == [0.875, 1.2]


def test_order_of_repairs() -> None:
    published = {
        "none": 0.298, "rotate": 0.109, "random-15%": 0.099, "first-8": 0.050, "v-5%": 0.047, "v-15%": 0.034
    }  # fmt: skip
    assert all(chunks.order(published).values())
    wrong = chunks.order(published | {"random-15%": 0.05})
    assert [name for name, holds in wrong.items() if not holds] == ["random rows >> first 8"]


def test_repairs_as_a_picture(tmp_path: Path) -> None:
    outcomes = {
        (kind, repair): [PolicyOutcome(Fidelity(kl, 0.9, 0.01), work, 0.1)]
        for kind in KINDS
        for repair, kl, work in (("v-15%", 0.03, 0.18), (chunks.BEST, 0.02, 0.09))
    }
    chunks.draw(chunks.Table(outcomes, [], []), tmp_path / "new" / "chunks.svg", "a model")
    text = (tmp_path / "new" / "chunks.svg").read_text()
    assert all(word in text for word in ("v-15%", chunks.BEST, "a model", "ours", "published"))
    assert (tmp_path / "new" / "chunks.png").stat().st_size > 1000


def told(nll: float, right: float, tokens: int = 4) -> qa.Told:
    return qa.Told(tokens, nll, right, kl=0.01, seconds=1.0, prompt=100, moved=80, gate="kl-0.034 by rotate")


def test_what_the_gate_loses() -> None:
    answers = {qa.FULL: [told(2.0, 0.5), told(1.0, 1.0, 2)]}
    answers |= {name: [told(2.0, 0.5), told(1.0, 1.0, 2)] for name in ("kl-0.025", "kl-0.05")}
    answers["kl-0.1"] = [told(2.2, 0.25), told(1.0, 1.0, 2)]
    figures = qa.figures(answers, "made up", bars=True)
    value = {figure.metric: figure.value for figure in figures}
    assert value["right answer, full prefill"] == pytest.approx(10 / 6)
    assert value["right answer, kl-0.1"] == pytest.approx(10.8 / 6)
    assert [figure.value for figure in figures[-4:]] == [0, 0, 0, 0]
    answers["kl-0.05"] = answers["kl-0.1"]
    lost, fine = (qa.figures(answers, "made up", bars=True)[i:][:2] for i in (-4, -2))
    assert [figure.value for figure in fine] == [0, 0], "each permission's loss is its own"
    assert [round(figure.value, 2) for figure in lost] == [8.0, 16.67]
    assert not any(figure.passed for figure in lost)
    # 4 tokens lose .2 nats and 2 none, .133 on average: sqrt(2 ((4 * .067)^2 + (2 * .133)^2)) / 6 of 1.667.
    assert "standard error 5.3 %" in lost[0].note


def test_made_up_documents_hold_their_answers() -> None:
    made = facts(16)
    assert len(set(made.documents)) == 16
    for question in made.questions:
        assert question.answer in made.documents[question.document]
    assert facts(16) == made


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rag").mkdir()
    monkeypatch.setenv("CTXREUSE_TRACES", str(tmp_path))
    return tmp_path / "rag"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(lzma.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


@pytest.mark.slow
def test_without_traces_there_are_texts_all_the_same(traces: Path) -> None:
    assert not long_texts().real
    assert sum(map(len, long_texts().texts)) > 100_000
    assert not questions().real
    assert not pool(20).real
    assert len(set(pool(20).texts)) == 20


def test_traces_as_they_lie(traces: Path) -> None:
    write(traces / "loogle_wikipedia.jsonl.xz", [{"text": "a" * 5000, "title": "t"}])
    talk = [{"speaker": "A", "content": "b" * 3000}]
    write(traces / "qmsum_meetings.jsonl.xz", [{"meeting_transcripts": talk}] * 6)
    found = long_texts()
    assert found.real
    assert sorted(text[0] for text in found.texts) == ["a", "b", "b"]
    write(traces / "podcasts_documents.jsonl.xz", [{"doc": i, "text": f"part {i}"} for i in range(10)])
    assert pool(3).texts == ["part 0", "part 3", "part 6"]
    write(
        traces / "lihua_world_chats.jsonl.xz", [{"doc": "1_10", "text": "short"}, {"doc": "1_11", "text": "x" * 2000}]
    )
    asked = [{"question": "q", "answer": "r", "evidence": e, "type": "Single"} for e in ("1_1:0", "1_11", "9_9")]
    write(traces / "lihua_world_questions.jsonl.xz", asked)
    some = questions()
    assert some.real
    assert some.documents == ["short"]
    assert [(one.answer, one.document) for one in some.questions] == [("r", 0)]


@pytest.mark.parametrize("data", [b"", b"no archive", lzma.compress(b"[1]\n"), lzma.compress(b"{}\n" * 9)[:-8]])
def test_a_damaged_trace_is_an_error(traces: Path, data: bytes) -> None:
    (traces / "podcasts_documents.jsonl.xz").write_bytes(data)
    with pytest.raises(ConfigError, match="the trace cannot be read") as raised:
        pool(3)
    assert "podcasts" in str(raised.value.where)


def test_documents_are_cut_where_words_end(archive: Archive) -> None:
    text = " ".join(f"word{Random(i).randrange(100)}" for i in range(50))
    (cut,) = cut_to(archive.text, [text, "too short"], 100)
    assert text.startswith(cut)
    assert text[len(cut)] == " "
    assert 90 < len(cut) <= 100
