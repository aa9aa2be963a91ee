"""Blocks, states and cards that version 0.1.0 wrote are read, decoded and written again to the byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ctxreuse.block.format import BlockView, parse, rekey, reseal
from ctxreuse.codec import Codec, ProfileStore, read_profile, write_profile
from ctxreuse.identity.model import ModelSpace
from ctxreuse.reuse.profile import ChunkProfileStore, read_chunk_profile, write_chunk_profile

DATA = Path(__file__).with_name("data")
INDEX = json.loads((DATA / "blocks/index.json").read_text("utf-8"))
CARDS = json.loads((DATA / "cards/expected.json").read_text("utf-8"))


def sha(data: Any) -> str:
    return hashlib.sha256(memoryview(data).cast("B")).hexdigest()


def block(name: str) -> BlockView:
    return parse((DATA / "blocks" / f"{name}.block").read_bytes())


def space_of(name: str) -> ModelSpace:
    return msgspec.convert(INDEX[name]["space_fields"], ModelSpace)


def codec_of(name: str) -> Codec:
    """The codec with the card that the block's level names; of exact levels any card of the model."""
    space, card = space_of(name), INDEX[name]["level"].partition("@")[2]
    shelf = ProfileStore(DATA / "cards")
    return Codec(space, shelf.find(space, card) if card else shelf.newest(space), profiles=shelf)


def described(view: BlockView) -> dict[str, Any]:
    head = view.header
    planes = {
        f"{p.layer} {p.role}": [p.dtype, [*p.shape], sha(view.plane(p.layer, p.role))] for p in view.layout.planes
    }
    return {
        "kind": head.kind,
        "level": head.level,
        "space": head.space.hex(),
        "key": head.key.hex(),
        "parent": head.parent.hex(),
        "end": head.end,
        "tokens": view.tokens.tolist(),
        "rope_at": head.rope_at,
        "extra": dict(head.extra),
        "start": view.start,
        "planes": planes,
    }


@pytest.mark.parametrize("name", INDEX)
def test_reads_and_writes_again(name: str) -> None:
    view = block(name)
    view.verify()
    assert described(view).items() <= INDEX[name].items()
    assert view.header.space == space_of(name).digest
    assert bytes(reseal(view, {})) == bytes(view.buffer)
    assert bytes(rekey(view.buffer, view.header.key, view.header.parent)) == bytes(view.buffer)


@pytest.mark.parametrize("name", [name for name, known in INDEX.items() if "of" in known])
def test_decodes_and_encodes_again(name: str) -> None:
    view, known, codec = block(name), INDEX[name], codec_of(name)
    assert codec.knows(view.header.level)
    assert described(parse(codec.decode(view))) == known["decoded"]
    raw = next(v for v in map(block, INDEX) if sha(v.buffer) == known["of"])
    made = codec.encode(raw, known["level"].partition("@")[0])
    assert made.tobytes() == bytes(view.buffer)


@pytest.mark.parametrize("name", ["refinement-f32", "refinement-bf16"])
def test_refinements(name: str) -> None:
    finer, known, codec = block(name), INDEX[name], codec_of(name)
    base = block(known["base"])
    assert sha(codec.merge(base, finer)) == known["merged"]
    assert described(parse(codec.decode(base, finer))) == known["decoded"]
    raw = block("exact-f32" if name.endswith("f32") else "exact-bf16")
    assert codec.refinement(raw, "kl-0.005").tobytes() == bytes(finer.buffer)


def test_cards() -> None:
    for name, digest in CARDS["files"].items():
        data = (DATA / "cards" / name).read_bytes()
        assert sha(data) == digest
        if name.endswith(".card"):
            assert digest.startswith(Path(name).stem)
            assert write_profile(read_profile(data)) == data
        else:
            assert write_chunk_profile(read_chunk_profile(data)) == data


def test_shelves(tmp_path: Path) -> None:
    """Both kinds of card are found in the folders, and under the names, that they had."""
    space = msgspec.convert(CARDS["space_fields"], ModelSpace)
    codec = Codec.open(space, ProfileStore(DATA / "cards"))
    assert [level.name for level in codec.levels] == ["exact", "exact+rans", "kl-0.05", "kl-0.01", "kl-0.005"]
    card = ChunkProfileStore(DATA / "cards").find(space)
    assert card is not None
    unnamed = msgspec.structs.replace(card, model=b"")
    assert json.loads(msgspec.json.encode(unnamed)) | {"model": card.model.hex()} == CARDS["chunk_card"]
    fresh, chunks = ProfileStore(tmp_path / "new"), ChunkProfileStore(tmp_path / "new")
    for path in (DATA / "cards").rglob("*.card"):
        fresh.add(path.read_bytes())
    chunks.add(card)
    written = {str(path.relative_to(tmp_path / "new")): sha(path.read_bytes()) for path in fresh.folder.glob("*/*")}
    assert written == CARDS["files"]
