"""A whole calibration of tiny models: cards that are valid, the same each time, and serve the codec."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ctxreuse.block.format import parse
from ctxreuse.calibrate import Settings, Target, Texts, calibrate, default_texts, read_texts, settings_for
from ctxreuse.calibrate.assemble import without_waste
from ctxreuse.calibrate.texts import PARTS, in_turn, windows, windows_by_kind
from ctxreuse.codec import Codec, CodecProfile, model_digest, profile_digest, read_profile, write_profile
from ctxreuse.errors import ConfigError

NO_NOTES: dict[str, str] = {}
#: Layers that are coded as one.
_KINDS = {"llama": {(0, 1)}, "gemma3": {(0, 2), (1,)}}


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def made(
    request: Any, gauge_of: Any, text: Any, texts: Texts, settings: Settings
) -> tuple[str, CodecProfile, list[tuple[str, int, int]]]:
    """A card, and the progress that was told on the way."""
    told: list[tuple[str, int, int]] = []
    model = gauge_of(request.param)
    profile = calibrate(model, text, texts, settings, lambda *step: told.append(step), {"text": "default"})
    return request.param, profile, told


def test_a_card_is_whole(made: Any, gauge_of: Any) -> None:
    name, profile, told = made
    space = gauge_of(name).space
    assert profile.model == model_digest(space)
    assert all(set(level.kinds) == {"prose", "chat", "code"} for level in profile.levels)
    assert 0.5 <= profile.unseen <= 1
    assert profile.unseen_share(np.arange(space.vocab_size, dtype=np.int32)) > 0
    assert set(profile.alone.number) == {(i, role) for i, spec in enumerate(space.layers) for role in "kv"}
    # Windows and layers that keep all tokens are not coded as one.
    assert {tuple(sorted({part.layer for part in plane.parts})) for plane in profile.joint} == _KINDS[name]
    read = read_profile(write_profile(profile))
    assert read.notes == {"text": "default"}
    assert write_profile(read) == write_profile(profile)
    assert len(profile.tables) <= 64
    assert {rope.style for rope in profile.ropes} == {"half"}
    assert len(profile.ropes) == (2 if name == "gemma3" else 1)
    stages = list(dict.fromkeys(what for what, _, _ in told))
    assert stages == ["reading", "gradients", "transforms", "steps", "tables", "held-out text"]
    assert all(done == total for what, done, total in told[-1:])


def test_levels_fall_in_order(made: Any) -> None:
    assert {level.info.name for level in made[1].levels[2:]} == {"kl-0.012", "kl-0.01"}
    assert [level.info.name for level in made[1].levels[:2]] == ["kl-0.05-joint", "kl-0.05"]
    levels = [level for level in made[1].levels if not level.joint]
    steps, bits = [level.step for level in levels], [level.info.bits for level in levels]
    assert steps == sorted(steps, reverse=True)
    assert bits == sorted(bits)
    for level in levels:
        assert 0 < level.info.kl < 6 * float(level.info.name[3:])
        assert 0 <= level.info.top1 <= 1
    for coarse, fine in pairwise(levels):
        assert fine.info.kl < 1.2 * coarse.info.kl  # one window is little to measure on
        coded = [sum(len(coding.table) for coding in level.codings) for level in (coarse, fine)]
        assert coded == sorted(coded)


def test_nested_levels_fit(made: Any) -> None:
    profile = made[1]
    base, fine = profile.levels[profile.number("kl-0.05")], profile.levels[profile.number("kl-0.012")]
    assert (fine.info.base, base.info.base) == ("kl-0.05", "")
    assert np.float32(base.step) == np.float32(3) * np.float32(fine.step)
    assert all(len(b.refine) == len(a.table) for a, b in zip(base.codings, fine.codings))
    for coding in fine.codings:
        assert (profile.tables[coding.refine][:, :3] > 0).all()


def test_the_codec_reads_the_card(made: Any, engine_of: Any, text: Any, texts: Texts) -> None:
    name, profile, _ = made
    engine = engine_of(name)
    context = engine.new_context()
    engine.prefill(context, text.encode(texts["held-out"]["prose"][0])[:48])
    keys = [bytes([i]) * 32 for i in range(3)]
    view = parse(list(engine.export(context, keys, bytes(32), 0))[2])
    codec = Codec(engine.space, (profile_digest(write_profile(profile)).hex(), profile))
    error = {}
    for level in profile.levels:
        coded = parse(codec.encode(view, level.info.name))
        back = parse(codec.decode(coded))
        planes = [(p.layer, p.role) for p in view.layout.planes]
        pairs = [[v.array(*at).astype(float) for v in (view, back)] for at in planes]
        error[level.info.name] = sum(float(np.abs(a - b).mean() / np.abs(a).mean()) for a, b in pairs)
    assert error["kl-0.012"] < error["kl-0.05"] < 2 * len(planes)
    base, finer = parse(codec.encode(view, "kl-0.05")), parse(codec.refinement(view, "kl-0.012"))
    np.testing.assert_array_equal(codec.merge(base, finer), codec.encode(view, "kl-0.012"))


def test_equal_input_gives_equal_bytes(gauge_of: Any, text: Any, texts: Texts, settings: Settings) -> None:
    few = settings._replace(windows={"calibration": 2, "validation": 1, "held-out": 1}, targets=(Target(0.02),))
    first, again = (write_profile(calibrate(gauge_of("llama"), text, texts, few, silent, NO_NOTES)) for _ in range(2))
    assert first == again
    other = write_profile(calibrate(gauge_of("llama"), text, texts, few._replace(epsilon=0.1), silent, NO_NOTES))
    assert other != first


def test_joint_levels_alone(gauge_of: Any, engine_of: Any, text: Any, texts: Texts, settings: Settings) -> None:
    counts: Any = {"calibration": 2, "validation": 1, "held-out": 1}
    few = settings._replace(windows=counts, targets=(Target(0.05, 0.02, joint=True),))
    profile = read_profile(write_profile(calibrate(gauge_of("llama"), text, texts, few, silent, NO_NOTES)))
    assert [level.info.name for level in profile.levels] == ["kl-0.05-joint", "kl-0.02-joint"]
    engine = engine_of("llama")
    context = engine.new_context()
    engine.prefill(context, text.encode(texts["held-out"]["prose"][0])[:32])
    view = parse(list(engine.export(context, [bytes([i]) * 32 for i in range(2)], bytes(32), 0))[1])
    codec = Codec(engine.space, (profile_digest(write_profile(profile)).hex(), profile))
    base, more = parse(codec.encode(view, "kl-0.05-joint")), parse(codec.refinement(view, "kl-0.02-joint"))
    assert codec.merge(base, more).tobytes() == codec.encode(view, "kl-0.02-joint").tobytes()
    assert [plane.nbytes > 0 for plane in base.layout.planes] == [True, False, False, False]


def test_joint_levels_that_save_nothing_are_left_out(made: Any) -> None:
    profile = made[1]
    assert any(level.joint for level in profile.levels)
    assert without_waste(profile) is profile
    dear = [replace(level, info=replace(level.info, bits=20.0)) if level.joint else level for level in profile.levels]
    left = without_waste(replace(profile, levels=tuple(dear)))
    assert [level.info.name for level in left.levels] == [x.info.name for x in profile.levels if not x.joint]
    assert (left.version, left.joint) == (2, ())
    again = read_profile(write_profile(left))
    assert [level.info for level in again.levels] == [level.info for level in left.levels]


def test_hybrid_layers_and_unrotated_keys(gauge_of: Any, text: Any, texts: Texts, settings: Settings) -> None:
    few = settings._replace(windows={"calibration": 2, "validation": 1, "held-out": 1}, targets=(Target(0.02),))
    for name, style in (("falconh1", "half"), ("gpt2", "none")):
        profile = calibrate(gauge_of(name), text, texts, few, silent, NO_NOTES)
        assert {rope.style for rope in profile.ropes} == {style}
        assert profile.levels[0].info.kl < 0.1


def test_parts_share_no_text(texts: Texts) -> None:
    parts = texts
    assert set(parts) == set(PARTS)
    for kind in ("prose", "chat", "code", "tables", "languages"):
        starts = [{document[:200] for document in parts[part][kind]} for part in PARTS]
        assert not starts[0] & starts[1] | starts[0] & starts[2] | starts[1] & starts[2]
        assert all(sum(map(len, parts[part][kind])) > 3_000 for part in PARTS)
    assert default_texts() == parts, "the same each time"


def test_windows_are_shared_out_to_the_kinds(text: Any, texts: Texts) -> None:
    found = windows_by_kind(texts["validation"], text, 8, 200)
    assert [one.kind for one in found] == ["prose", "chat", "code", "tables", "languages", "prose", "chat", "code"]
    few = windows_by_kind({"long": ["ab" * 500], "short": ["c"]}, text, 4, 100)
    assert [one.kind for one in few] == ["long", "long"]


def test_the_kind_that_suffers_most_sets_the_steps(gauge_of: Any, text: Any, texts: Texts, settings: Settings) -> None:
    few = settings._replace(windows={"calibration": 2, "validation": 2, "held-out": 2}, targets=(Target(0.02),))
    two: Texts = {part: {kind: texts[part][kind][:1] for kind in ("prose", "languages")} for part in PARTS}
    one: Texts = {part: {"all": in_turn(two[part])} for part in PARTS}
    worst, mean = (calibrate(gauge_of("llama"), text, given, few, silent, NO_NOTES) for given in (two, one))
    assert worst.levels[0].step < 0.99 * mean.levels[0].step
    assert set(worst.levels[0].kinds) == {"prose", "languages"}
    kinds = worst.levels[0].kinds.values()
    assert worst.levels[0].info.kl == pytest.approx(sum(kind.kl for kind in kinds) / 2)
    assert worst.levels[0].info.bits == pytest.approx(sum(kind.bits for kind in kinds) / 2)


def test_windows_take_turns(text: Any) -> None:
    found = windows(["abcdefgh" * 4, "x", "0123456789" * 3], text, 10, 12)
    written = [text.decode(ids) for ids in found]
    assert written[:3] == ["abcdefghabcd", "system: 0123", "efghabcdefgh"]
    assert all(len(ids) == 12 for ids in found)
    assert not windows(["too short"], text, 3, 12)


def test_what_is_scored_behind_a_message_begins_the_next_one(text: Any) -> None:
    found = [text.decode(ids) for ids in windows(["abcdefgh" * 20], text, 4, 40, prefix=20)]
    assert all(len(ids) == 40 for ids in windows(["abcdefgh" * 20], text, 4, 40, prefix=20))
    assert found[1].startswith("system: ")
    assert found[1][20:].lstrip("\n").startswith("user: ")
    assert "user" not in found[0] + found[2]


def test_files_are_cut_in_three(tmp_path: Any, text: Any, gauge_of: Any, settings: Settings) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("".join(f"{i} " for i in range(2000)))
    parts = read_texts([file])
    assert "".join(parts[part]["notes.txt"][0] for part in PARTS) == file.read_text()
    file.write_text("nothing much")
    with pytest.raises(ConfigError, match="calibration text is too short: not one window of 120 tokens"):
        calibrate(gauge_of("llama"), text, read_texts([file]), settings, silent, NO_NOTES)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_texts([file])


def test_targets_as_users_write_them() -> None:
    assert Target.parse("0.05+0.008, .01") == (Target(0.05, 0.008), Target(0.01))
    assert Target.parse("0.05-joint,0.05") == (Target(0.05, joint=True), Target(0.05))
    assert Target(0.05, 0.008).names == ("kl-0.05", "kl-0.008")
    assert Target(0.05, 0.008, joint=True).names == ("kl-0.05-joint", "kl-0.008-joint")
    for wrong in ("", "kl-0.05", "2", "0.01+0.05", "0.01+0.01", "-0.1", "0.1,0.1", "0.05+", "0.1-joint,0.1-joint"):
        with pytest.raises(ConfigError):
            Target.parse(wrong)


def test_amounts_suit_the_model(gauge_of: Any) -> None:
    assert settings_for(gauge_of("llama"))[1:3] == (768, 192)
    assert settings_for(gauge_of("gpt2")).prefix == 512 - 192
