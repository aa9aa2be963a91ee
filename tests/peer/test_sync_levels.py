"""What a device keeps packed is given to clouds as it was; what it keeps with loss is not given at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctxreuse.block.format import parse, rekey
from ctxreuse.codec import Codec, profile_digest, read_profile, write_profile
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import ROOT, prefix_keys, tenant_salt
from ctxreuse.peer.sync.plan import Holdings, Translation, exact_bytes, exact_nbytes
from ctxreuse.store import TieredStore
from support.profiles import make_block, make_profile, make_space


def packed_context() -> Any:
    """A block of the tenant ``default``, raw and at two levels."""
    space = make_space("bfloat16")
    card = make_profile(space)
    data = write_profile(card)
    codec = Codec(space, (profile_digest(data).hex(), read_profile(data)))
    raw = make_block(space, card, start=0)
    key = prefix_keys(space.digest, tenant_salt("default"), raw.tokens, space.block_tokens)[0]
    view = parse(rekey(raw.buffer, key, ROOT))
    return SimpleNamespace(space=space, codec=codec, key=key, view=view)


def test_a_packed_block_is_unpacked_to_the_same_bytes() -> None:
    given = packed_context()
    packed = parse(given.codec.encode(given.view, "exact+rans"))
    assert packed.header.level == "exact+rans"
    assert exact_nbytes(packed) == exact_nbytes(given.view) == len(given.view.buffer)
    assert bytes(exact_bytes(packed)) == bytes(given.view.buffer) == bytes(exact_bytes(given.view))
    spoiled = np.frombuffer(packed.buffer, np.uint8).copy()
    spoiled[packed.offset(0, "k")] ^= 0xFF
    with pytest.raises(FormatError):
        exact_bytes(parse(spoiled))


@pytest.mark.parametrize("level", ["exact", "exact+rans", "kl-0.01"])
def test_what_is_offered(level: str) -> None:
    given = packed_context()
    with TieredStore(16 << 20) as store:
        assert store.put(given.key, given.codec.encode(given.view, level), max_kl=0.05)
        holdings = Holdings(store, "default")
        assert holdings.refresh(lambda: False)
        if level == "kl-0.01":
            assert holdings.order == []
            return
        assert holdings.order == [given.key]
        assert holdings.header(given.key).nbytes == len(given.view.buffer)
        translation = Translation(holdings, b"s" * 16)
        translation.refresh()
        sent = parse(translation.read(given.key, "block"))
        assert sent.header.level == "exact"
        assert len(sent.buffer) == holdings.header(given.key).nbytes
        for plane in given.view.layout.planes:
            assert bytes(sent.plane(plane.layer, plane.role)) == bytes(given.view.plane(plane.layer, plane.role))
