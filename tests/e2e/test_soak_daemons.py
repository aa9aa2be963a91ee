"""100,000 mixed requests through a real edge and a real cloud: none fails, and none of their processes grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.soak import Soak, growth

pytestmark = [pytest.mark.daemon, pytest.mark.nightly]

_REQUESTS = 100_000
#: Requests after which all that is bounded is full: of 4,096 sessions that are learnt from, one comes in four, and of
#: 2,048 that the cloud explains, one in seven.
_WARM = 20_000
#: Growth after that of what is in use; and of anonymous memory, of which a daemon may keep freed bytes for later.
_FLAT, _KEPT = 0.02, 0.1


@pytest.mark.timeout(6 * 3600)
def test_edge_and_cloud_stay_as_large_as_they_are(tmp_path: Path) -> None:
    soak = Soak(tmp_path)
    try:
        soak.fill()
        soak.run(_REQUESTS, samples=200)
    finally:
        soak.close()
    assert soak.wrong == []
    assert len(soak.kinds) == 12
    assert soak.busy < _REQUESTS // 100
    for name, held in soak.held.items():
        warm = [one for one in held if one.requests >= _WARM]
        for figure in ("descriptors", "threads"):
            early, late = (sorted(getattr(one, figure) for one in part)[4] for part in (warm[:9], warm[-9:]))
            assert late <= early + 1, f"{figure} of the {name}: {early}, then {late}"
        assert growth(warm) < (_FLAT if name == "its engine" else _KEPT), f"{name}: {[one.anonymous for one in warm]}"
        for figure in ("used", "blocks") if name != "its engine" else ():
            assert growth(warm, figure) < _FLAT, f"{figure} of the {name}: {[getattr(one, figure) for one in warm]}"
