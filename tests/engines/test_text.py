"""Tokenizer, template and detokenising, on small tokenizers of both families built here."""

import json
from datetime import datetime
from pathlib import Path
from random import Random
from string import ascii_lowercase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ctxreuse.engines.detokenize import Detokenizer, StopStrings
from ctxreuse.engines.pieces import pieces_of
from ctxreuse.engines.text import HFText, Message, TextModel
from ctxreuse.errors import ConfigError, EngineError

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level():
    """Every byte a token: each character beyond ASCII is several ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def metaspace():
    """Words with a leading mark for the blank, stripped at the beginning of a text."""
    words = ["<unk>", "▁the", "▁light", "house", "▁", "▁a", "t", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": CHAT, "eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    return tmp_path


def test_characters_of_a_token_are_bounded_only_where_each_byte_has_one():
    assert HFText(byte_level()).token_chars == 4  # </s>
    assert HFText(metaspace()).token_chars == 0, "a run of unknown characters is one token"
    alphabet = {char: n for n, char in enumerate(pre_tokenizers.ByteLevel.alphabet()) if char not in "\u0104\u00f5"}
    without = Tokenizer(models.BPE(vocab=alphabet | {"abc": 300}, merges=[]))
    without.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert HFText(without).token_chars == 3, "a control and no byte of UTF-8 are missing, as in SmolLM2"
    composing = byte_level()
    composing.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "__")])
    assert HFText(composing).token_chars == 16
    for lossy in (normalizers.Strip(), normalizers.Replace(Regex(" +"), " "), normalizers.Replace("aa", "b")):
        composing.normalizer = lossy
        assert HFText(composing).token_chars == 0
    removing = byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert HFText(removing).token_chars == 0
    swallowing = byte_level()
    swallowing.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    assert HFText(swallowing).token_chars == 0
    partial = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    partial.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert HFText(partial).token_chars == 0, "what has no token is left out"


def test_a_folder_gives_tokenizer_template_and_stop_ids(folder):
    text = HFText.open(folder)
    assert isinstance(text, TextModel)
    assert text.stop_ids == {3, 4, 5, text.encode("</s>")[0]}
    messages = [Message("system", "Be brief."), Message("user", "Grüße")]
    assert text.render(messages, generate=True) == "<s>system:Be brief.</s><s>user:Grüße</s><s>assistant:"
    assert text.render(messages, generate=False).endswith("</s>")
    ids = text.encode(text.render(messages, generate=True))
    assert ids.dtype == np.int32
    assert text.decode(ids) == "system:Be brief.user:Grüßeassistant:"
    assert text.decode(ids, markers=True) == text.render(messages, generate=True)


def test_a_users_markers_can_be_kept_plain(folder):
    text = HFText.open(folder)
    assert len(text.encode("</s>")) == 1
    plain = text.encode("</s>", markers=False)
    assert len(plain) == 4
    assert text.decode(plain) == "</s>"


def test_a_template_of_its_own_file_wins_and_named_ones_have_a_default(folder):
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert HFText.open(folder).render([], generate=False) == "D"
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}{{ messages|tojson }}")
    text = HFText.open(folder)
    text._now = lambda: datetime(1839, 5, 1)
    assert text.render([Message("user", "é<", name="Ann")], generate=False) == (
        '1839[{"role": "user", "content": "é<", "name": "Ann"}]'
    )


def test_a_base_model_gets_lines(folder):
    (folder / "tokenizer_config.json").unlink()
    text = HFText.open(folder)
    messages = [Message("system", "S"), Message("user", "U", name="Ann")]
    assert text.render(messages, generate=True) == "system: S\nAnn: U\nassistant:"
    assert text.render(messages, generate=False) == "system: S\nAnn: U\n"


def test_a_base_models_text_begins_with_the_mark_its_tokenizer_adds():
    tokenizer = byte_level()
    specials = {"bos_token": "<s>"}
    assert HFText(tokenizer, specials=specials).render([], generate=True) == "assistant:"
    mark = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", mark)])
    text = HFText(tokenizer, specials=specials)
    assert text.render([], generate=True) == "<s>assistant:"
    assert mark not in text.encode("x"), "encode adds nothing"
    assert text.encode(text.render([], generate=True))[0] == mark


def test_templates_that_refuse_or_are_broken_or_hostile(folder):
    def render(template):
        return HFText(byte_level(), template=template).render([Message("user", "x")], generate=True)

    with pytest.raises(EngineError, match="must alternate"):
        render("{{ raise_exception('must alternate') }}")
    with pytest.raises(ConfigError, match="does not compile"):
        render("{% for %}")
    with pytest.raises(EngineError, match="unsafe"):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(EngineError, match="refuses these messages"):
        render("{{ messages[0].content + 1 }}")
    assert render("{{ 'é'|tojson(ensure_ascii=true) }}") == '"\\u00e9"'


def test_files_that_are_broken_are_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        HFText.open(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        HFText.open(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        HFText.open(folder)
    (folder / "tokenizer.json").unlink()
    assert HFText.open(folder) is None
    with pytest.raises(EngineError, match="tokenised"):
        HFText(byte_level()).encode("\ud800")


@given(st.text(max_size=60).filter(lambda s: s.isprintable() and "\ufffd" not in s), st.text("aé😀 ", max_size=8))
def test_pieces_of_text_join_to_the_whole_and_hold_whole_characters(text, before):
    tokenizer = HFText(byte_level())
    words = Detokenizer(tokenizer, tokenizer.encode(before).tolist())
    parts = [words.add(int(i)) for i in tokenizer.encode(text)]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) + words.flush() == tokenizer.decode(tokenizer.encode(text))


JOINED = HFText(byte_level())
PIECES = pieces_of(JOINED)


@given(st.lists(st.integers(0, 257), max_size=40))
def test_pieces_of_a_byte_level_vocabulary_join_to_what_its_tokenizer_decodes(ids):
    assert PIECES is not None
    assert PIECES.decode(ids) == JOINED.decode(ids)
    assert PIECES.decode([*ids, 258]) is None, "no token of this vocabulary"


def test_pieces_are_not_joined_where_the_first_one_is_another_than_the_same_one_later():
    assert pieces_of(HFText(metaspace())) is None


def test_bytes_that_never_become_a_character_come_out_in_the_end():
    tokenizer = HFText(byte_level())
    lead = int(tokenizer.encode("😀")[0])
    words = Detokenizer(tokenizer)
    parts = [words.add(lead) for _ in range(40)]
    assert "".join(parts) + words.flush() == "\ufffd" * 40
    assert any(parts)


def test_blanks_of_word_tokens_survive_special_ids_between_them():
    tokenizer = HFText(metaspace())
    words = Detokenizer(tokenizer, [5, 6])
    assert [words.add(i) for i in (1, 2, 3, 7, 7, 7, 7, 7, 7, 7, 1)] == [" the", " light", "house", *[""] * 7, " the"]
    assert words.flush() == ""


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_are_found_across_pieces_and_nothing_is_lost(parts, stops):
    watch, out = StopStrings(stops), ""
    for part in parts:
        out += watch.add(part)
        if watch.found:
            break
        assert not any(stop in out for stop in stops)
    whole = "".join(parts)
    first = min((whole.find(s) + len(s) for s in stops if s in whole), default=None)
    if first is None:
        assert not watch.found
        assert out + watch.flush() == whole
    else:
        assert watch.found
        assert whole.startswith(out)
        assert not any(stop in out for stop in stops)
        assert any(whole[len(out) :].startswith(stop) for stop in stops)


def test_words_that_never_come_again_take_bounded_memory() -> None:
    text, chance = HFText(byte_level()), Random(0)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def encode(count: int) -> None:
        for _ in range(count):
            assert len(text.encode("".join(chance.choices(ascii_lowercase, k=200)))) > 0

    encode(1100)
    before = resident()
    encode(9000)
    assert resident() - before < 16 << 20  # 10,000 words, which the package would keep, take 60 MB
