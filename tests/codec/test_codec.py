"""Whole blocks through every level: what comes back, and how hostile bytes are met."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.block.format import BlockView, BlockWriter, Layout, parse
from ctxreuse.block.levels import EXACT, JOINT, PACKED
from ctxreuse.codec import (
    Codec,
    CodecProfile,
    ProfileStore,
    model_digest,
    parse_level,
    profile_digest,
    read_profile,
    write_profile,
)
from ctxreuse.codec.planes import plane_coder
from ctxreuse.codec.profile import KindFigures
from ctxreuse.errors import ConfigError, FormatError
from ctxreuse.kernels import RansTables
from ctxreuse.kernels.convert import from_float32, to_float32
from support.examples import examples
from support.profiles import DIM, HEADS, LAYERS, make_block, make_profile, make_space

ALONE = ("kl-0.05", "kl-0.01", "kl-0.005")
LOSSY = (*ALONE, *(name + JOINT for name in ALONE))
PLANES = [(layer, role) for layer in range(LAYERS) for role in ("k", "v")]


def codec_of(space, **card) -> Codec:
    data = write_profile(make_profile(space, **card))
    return Codec(space, (profile_digest(data).hex(), read_profile(data)))


def floats(view: BlockView, dtype: str) -> list[np.ndarray]:
    return [to_float32(view.array(*plane), dtype) for plane in PLANES]


def error(a: BlockView, b: BlockView, dtype: str) -> float:
    return max(float(np.sqrt(((x - y) ** 2).mean())) for x, y in zip(floats(a, dtype), floats(b, dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("card", [{}, {"style": "pairs"}, {"style": "none"}, {"groups": (1, 2)}, {"version": 1}])
def test_levels_come_back_within_their_steps(dtype, card):
    space = make_space(dtype)
    codec = codec_of(space, **card)
    block = make_block(space, codec.profile)
    sizes, errors = {}, {}
    for level in (info.name for info in codec.levels if info.lossy):
        data = codec.encode(block, level)
        coded = parse(data, space=space.digest)
        assert parse_level(coded.header.level) == (level, codec.digest[:16], "")
        assert (coded.header.key, coded.header.tokens, coded.header.end) == (
            block.header.key, block.header.tokens, block.header.end)  # fmt: skip
        back = parse(codec.decode(coded))
        assert back.header.level == f"approx~{level}"
        sizes[level] = sum(plane.nbytes for plane in coded.layout.planes)
        errors[level] = error(block, back, dtype)
    assert set(sizes) == set(LOSSY if codec.profile.joint else ALONE)
    for names in (ALONE, LOSSY[3:]) if codec.profile.joint else (ALONE,):
        raw = sum(plane.nbytes for plane in block.layout.planes)
        assert sizes[names[0]] < sizes[names[1]] < sizes[names[2]] < raw * 0.5
        assert errors[names[0]] > errors[names[1]] > errors[names[2]] > 0
        # A step of 0.5 gives 0.14 a component, times the spread of the tokens' scales; two components are not coded.
        assert errors[names[2]] < (0.4 if names is ALONE else 0.6)


@pytest.mark.parametrize("groups", [(3,), (2, 1)])
@pytest.mark.parametrize("suffix", ["", JOINT])
def test_a_refinement_leads_to_the_very_bytes_of_the_finer_level(groups, suffix):
    space = make_space("bfloat16")
    codec = codec_of(space, groups=groups)
    block = make_block(space, codec.profile)
    base, more = parse(codec.encode(block, "kl-0.05" + suffix)), parse(codec.refinement(block, "kl-0.005" + suffix))
    whole = codec.encode(block, "kl-0.005" + suffix)
    assert bytes(codec.merge(base, more)) == bytes(whole)
    assert bytes(codec.decode(base, more)) == bytes(codec.decode(parse(whole)))
    heads = len(PLANES) * len(groups) * 280  # what a second stream of a cell costs, however short
    assert base.layout.nbytes + more.layout.nbytes - heads < 1.1 * parse(whole).layout.nbytes
    with pytest.raises(FormatError, match="without its base"):
        codec.decode(more)
    with pytest.raises(FormatError, match="does not refine"):
        codec.decode(parse(codec.encode(block, "kl-0.01")), more)
    other = "kl-0.05" if suffix else "kl-0.05" + JOINT
    with pytest.raises(FormatError, match="does not refine"):
        codec.decode(parse(codec.encode(block, other)), more)


def with_seen(profile: CodecProfile, ids: range, unseen: float) -> CodecProfile:
    seen = np.zeros(4096, bool)
    seen[list(ids)] = True
    figures = {"prose": KindFigures(0.009, 3.0), "code": KindFigures(0.004, 2.5)}
    levels = tuple(msgspec.structs.replace(level, kinds=figures) for level in profile.levels)
    return msgspec.structs.replace(profile, levels=levels, seen=np.packbits(seen).tobytes(), unseen=unseen)


def test_tokens_that_calibration_has_not_seen_get_a_stricter_level():
    space = make_space("bfloat16")
    plain = make_profile(space)
    block = make_block(space, plain)  # ids below 100
    share = float((np.frombuffer(block.header.tokens, "<i4") >= 60).mean())
    assert 0.2 < share < 0.6
    for unseen, levels in (
        (share + 0.01, {"kl-0.05": "kl-0.05", "kl-0.01": "kl-0.01"}),
        # A third of the KL at most: kl-0.005 is not worth the name of a stricter kl-0.01, and there is none below.
        (share - 0.01, {"kl-0.05": "kl-0.01", "kl-0.01": PACKED, "kl-0.05-joint": "kl-0.01-joint"}),
    ):
        data = write_profile(with_seen(plain, range(60), unseen))
        codec = Codec(space, (profile_digest(data).hex(), read_profile(data)))
        for level, used in levels.items():
            assert codec.level_for(block, level) == used
            digest = codec.digest[:16]
            full = used if used == PACKED else f"{used}@{digest}"
            assert codec.level_for(block, f"{level}@{digest}") == full
            assert parse(codec.encode(block, used)).header.level == full
        for level in (EXACT, PACKED, f"kl-0.05>kl-0.005@{codec.digest[:16]}"):
            assert codec.level_for(block, level) == level
    assert codec_of(space).level_for(block, "kl-0.05") == "kl-0.05", "a profile of 0.1.0 does not say what it has seen"
    assert Codec(space).level_for(block, PACKED) == PACKED


def test_kinds_and_tokens_seen_are_in_the_bytes_and_hostile_ones_are_refused():
    profile = with_seen(make_profile(make_space()), range(7, 1000), 0.25)
    data = write_profile(profile)
    read = read_profile(data)
    assert [level.kinds for level in read.levels] == [level.kinds for level in profile.levels]
    assert (read.seen, read.unseen) == (profile.seen, 0.25)
    assert write_profile(read) == data
    assert read.unseen_share(np.array([6, 7, 999, 1000, 1 << 30], np.int32)) == pytest.approx(0.6)
    one = profile.levels[0]
    for wrong in (
        {"unseen": 1.5},
        {"seen": bytes((1 << 20) + 1)},
        {"levels": (msgspec.structs.replace(one, kinds={"a": KindFigures(float("nan"), 1)}), *profile.levels[1:])},
        {"levels": (msgspec.structs.replace(one, kinds={"a": KindFigures(-1, 1)}), *profile.levels[1:])},
    ):
        with pytest.raises(FormatError):
            write_profile(msgspec.structs.replace(profile, **wrong))


def test_the_first_tokens_of_a_context_stay_as_they_are():
    space = make_space("float32")
    codec = codec_of(space)
    block = make_block(space, codec.profile, start=0)
    back = parse(codec.decode(parse(codec.encode(block, "kl-0.05"))))
    for plane in PLANES:
        given = to_float32(from_float32(block.array(*plane)[:, :4], "bfloat16"), "bfloat16")
        assert (given == back.array(*plane)[:, :4]).all()
        assert (block.array(*plane)[:, 4:] != back.array(*plane)[:, 4:]).any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38, 1e-40])
def test_a_token_that_cannot_be_coded_stays_as_it_is(value):
    space = make_space("float32")
    codec = codec_of(space)
    block = make_block(space, codec.profile)
    spoiled = BlockWriter(
        block.layout, kind="block", space=space.digest, key=bytes(32), parent=bytes(32), end=128, tokens=block.tokens,
        rope_at=64,
    )  # fmt: skip
    for plane in PLANES:
        array = block.array(*plane).copy()
        array[1, 10, 3] = value
        spoiled.plane(*plane)[:] = array.view(np.uint8).reshape(-1)
    view = parse(spoiled.seal())
    back = parse(codec.decode(parse(codec.encode(view, "kl-0.05"))))
    for plane in PLANES:
        before, after = view.array(*plane), back.array(*plane)
        if abs(value) > 1 or np.isnan(value):
            given = to_float32(from_float32(before[:, 10], "bfloat16"), "bfloat16")
            assert np.array_equal(given, after[:, 10], equal_nan=True)
        assert np.abs(np.delete(before, 10, axis=1) - np.delete(after, 10, axis=1)).max() < 4


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 63, 65, 130])
def test_blocks_of_other_sizes(block_tokens):
    space = make_space("float32", block_tokens)
    codec = codec_of(space)
    block = make_block(space, codec.profile)
    for level in LOSSY:
        assert error(block, parse(codec.decode(parse(codec.encode(block, level)))), "float32") < 2
    base, more = parse(codec.encode(block, "kl-0.05")), parse(codec.refinement(block, "kl-0.005"))
    assert bytes(codec.merge(base, more)) == bytes(codec.encode(block, "kl-0.005"))


def test_fill_writes_mixed_levels_to_an_engines_memory():
    space = make_space("bfloat16")
    codec = codec_of(space)
    blocks = [make_block(space, codec.profile, start=64 * i, seed=i) for i in range(4)]
    coded = [
        blocks[0],
        *(parse(codec.encode(b, level)) for b, level in zip(blocks[1:], ("kl-0.01", "exact+rans", "kl-0.05"))),
    ]
    more = [None, None, None, parse(codec.refinement(blocks[3], "kl-0.005"))]
    for layer, role in PLANES:
        memory = np.full((HEADS, 400, DIM), 7, np.uint16)
        codec.fill(coded, layer, role, memory, 10, more)
        for i, view in enumerate(coded):
            expected = parse(codec.decode(view, more[i])).array(layer, role)
            assert (memory[:, 10 + 64 * i : 74 + 64 * i] == expected).all()
        assert (memory[:, :10] == 7).all()
        assert (memory[:, 266:] == 7).all()


def test_a_level_without_card_says_what_to_do():
    space = make_space()
    codec = Codec(space)
    assert [info.name for info in codec.levels] == ["exact", "exact+rans"]
    with pytest.raises(ConfigError, match="ctxreuse calibrate"):
        codec.info("kl-0.01")
    with pytest.raises(ConfigError, match="There are exact"):
        codec_of(space).info("kl-0.03")
    coded = parse(codec_of(space).encode(make_block(space, make_profile(space)), "kl-0.01"))
    assert not codec.knows(coded.header.level)
    with pytest.raises(FormatError, match="is not here"):
        codec.decode(coded)


def test_what_a_permission_allows():
    codec = codec_of(make_space())
    names = lambda most: [info.name for info in codec.allowed(most)]  # noqa: E731
    assert names("") == ["exact", "exact+rans"]
    fine = ["kl-0.01-joint", "kl-0.01", "kl-0.005-joint", "kl-0.005"]
    assert names("kl-0.01") == names("kl-0.01-joint") == ["exact", "exact+rans", *fine]
    assert names("kl-0.05") == ["exact", "exact+rans", "kl-0.05-joint", "kl-0.05", *fine]


@examples("light")
@given(level=st.sampled_from([*LOSSY, "exact+rans"]), data=st.data())
def test_a_corrupt_stream_is_an_error_or_stays_in_bounds(level, data):
    """The container's checksum catches what happens by chance; this is what stands behind it: hostile bytes."""
    space = make_space("bfloat16", 32)
    codec = codec_of(space)
    coded = parse(codec.encode(make_block(space, codec.profile), level))
    stream = bytearray(coded.plane(0, "k"))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stream) - 1) | st.integers(0, 40))
        stream[min(at, len(stream) - 1)] = data.draw(st.integers(0, 255))
    stream = stream[: data.draw(st.integers(0, len(stream)) | st.just(len(stream)))] + data.draw(st.binary(max_size=3))
    planes = list(coded.layout.planes)
    planes[0] = planes[0]._replace(shape=(len(stream),))
    writer = BlockWriter(
        Layout(tuple(planes)), kind="block", space=space.digest, key=bytes(32), parent=bytes(32), end=96,
        tokens=coded.tokens, level=coded.header.level, rope_at=64,
    )  # fmt: skip
    for plane in planes:
        writer.plane(plane.layer, plane.role)[:] = np.frombuffer(
            stream if (plane.layer, plane.role) == (0, "k") else coded.plane(plane.layer, plane.role), np.uint8
        )
    memory = np.full((HEADS, 40, DIM), 7, np.uint16)
    try:
        codec.fill([parse(writer.seal())], 0, "k", memory, 4)
    except FormatError:
        pass
    assert (memory[:, :4] == 7).all()
    assert (memory[:, 36:] == 7).all()


def test_a_flipped_byte_anywhere_is_an_error():
    space = make_space("bfloat16", 16)
    codec = codec_of(space)
    for level in (*LOSSY, "exact+rans"):
        good = codec.encode(make_block(space, codec.profile), level)
        end = parse(good).start + parse(good).layout.nbytes
        for at in range(0, end, 7):
            bad = good.copy()
            bad[at] ^= 1 + at % 255
            try:
                back = parse(bad)
                codec.decode(back)
            except FormatError:
                continue
            assert bytes(codec.decode(back)) == bytes(codec.decode(parse(good)))  # padding between planes


def test_a_shelf_keeps_cards_by_model_and_digest(tmp_path):
    space = make_space()
    shelf = ProfileStore(tmp_path)
    assert shelf.newest(space) is None
    data = write_profile(make_profile(space))
    path = shelf.add(data)
    assert path.parent.name == model_digest(space).hex()[:16]
    digest, card = shelf.newest(space)
    assert digest == profile_digest(data).hex()
    assert shelf.data(space, digest[:16]) == data == write_profile(card)
    # One object for all who have it: a profile may be large.
    assert ProfileStore(tmp_path).find(space, digest[:16])[1] is shelf.newest(space)[1] is card
    other = Codec.open(space, shelf)
    assert other.digest == digest
    assert Codec(space, profiles=shelf).knows(f"kl-0.01@{digest[:16]}")
    damaged = bytearray(data)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(FormatError, match="damaged"):
        shelf.find(space, digest[:16])
    assert shelf.newest(space) is None


@examples("light")
@given(data=st.data())
def test_a_hostile_card_is_an_error(data):
    good = GOOD_CARD
    kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    if kind == "flip":
        bad = bytearray(good)
        bad[data.draw(st.integers(0, 600) | st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        bad = good[: data.draw(st.integers(0, len(good) - 1))] if kind == "cut" else good + b"x"
    try:
        card = read_profile(bytes(bad))
    except FormatError:
        return
    assert kind == "flip"
    assert len(card.tables) == len(read_profile(good).tables)


def test_a_profile_of_the_first_version_has_neither_whole_numbers_nor_rounded_levels():
    old, new = (make_profile(make_space(), version=version) for version in (1, 2))
    for profile in (old, new):
        read = read_profile(write_profile(profile))
        assert (read.version, write_profile(read)) == (profile.version, write_profile(profile))
        coder = plane_coder(read, read.number("kl-0.05"), 0, "k", RansTables(read.tables)).coders[0]
        narrow = int(coder.coding.narrow)
        assert (coder.whole is not None) == (narrow < len(coder.coding.table)) == (profile is new)
        assert ((coder.group.basis[narrow:] % 64 == 0).all(), (coder.group.basis[:narrow] % 64 == 0).all()) == (
            True,
            False,
        )
    with pytest.raises(FormatError, match="reads versions up to 3"):
        read_profile(GOOD_CARD[:8] + b"\x04" + GOOD_CARD[9:])


def test_joint_planes_must_be_those_that_are_coded_alone():
    profile = make_profile(make_space())
    (whole,) = profile.joint
    parts, one = whole.parts, whole.groups[0]
    half = msgspec.structs.replace(one, heads=HEADS * 2)
    for joint in (
        msgspec.structs.replace(whole, parts=(*parts[:-1], msgspec.structs.replace(parts[-1], layer=7))),
        msgspec.structs.replace(whole, parts=(*parts[:-1], parts[0])),
        msgspec.structs.replace(whole, heads=HEADS * 2, dim=DIM // 2, groups=(half,)),
    ):
        with pytest.raises(FormatError, match="joint planes that are not its planes"):
            write_profile(msgspec.structs.replace(profile, joint=(joint,)))


GOOD_CARD = write_profile(make_profile(make_space()))
