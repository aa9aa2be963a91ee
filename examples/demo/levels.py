"""A device that fetches the handbook from the demo's cloud at three levels, and measures what each does to the model.

``python -m demo.levels FOLDER ENDPOINT KEY_FILE SERVER_KEY``: a process with its own engine and key
that reports one JSON line an event, as the acts do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctxreuse.block.levels import expected_kl, family, limit_name
from ctxreuse.bus.transport import ClientOptions
from ctxreuse.errors import CtxReuseError, LinkDownError
from demo.acts import QUESTIONS, TASK, document, report

if TYPE_CHECKING:
    from ctxreuse.bus.transport import BusClient
    from ctxreuse.engines.torch_hf import TorchEngine
    from ctxreuse.identity.keys import Tokens

__all__ = ["main", "permissions", "play"]

#: Tokens of the context that are scored, behind what is fetched.
_SCORED = 192
_WAIT = 60.0
#: Windows of text that a quick calibration learns from.
_WINDOWS = 4
_ROOM = 2304


def permissions(names: Sequence[str]) -> list[float | None]:
    """What the three requests allow: nothing lossy, and of a card's levels a finer one and the coarsest."""
    levels = sorted(map(expected_kl, names))
    if not levels:
        return [None]
    return [None, *dict.fromkeys((levels[-1], levels[len(levels) // 2]))][:3]


def calibrate(engine: TorchEngine) -> None:
    """Calibrate with few windows of text and store the profile where the demo's cloud finds it."""
    from ctxreuse.calibrate import DEFAULT_TARGETS, default_texts, settings_for
    from ctxreuse.calibrate import calibrate as learn
    from ctxreuse.codec import Codec, ProfileStore, write_profile
    from ctxreuse.engines.torch_hf.fisher import TorchCalibrationModel

    def progress(what: str, done: int, total: int) -> None:
        report("calibrating", what=what, done=done, total=total)

    assert engine.text is not None
    gauge = TorchCalibrationModel(engine)
    # Joint levels learn from more text than this.
    targets = tuple(target for target in DEFAULT_TARGETS if not target.joint)
    settings = settings_for(gauge, calibration=_WINDOWS, validation=1, held_out=1)._replace(targets=targets)
    notes = {"model": "smollm2", "text": "Python's reference and library", "windows": f"{_WINDOWS}, for the demo"}
    ProfileStore().add(write_profile(learn(gauge, engine.text, default_texts(), settings, progress, notes)))
    engine.codec = Codec.open(engine.space)


def prompt_ids(folder: Path, engine: TorchEngine) -> Tokens:
    """Return the prompt ids of the other devices."""
    from ctxreuse_agents import Memory

    with Memory.open(folder, engine=engine) as memory:
        handbook = memory.create("handbook")
        handbook.system(TASK + document())
        fork = handbook.fork()
        fork.user(QUESTIONS[0])
        return fork.tokens(generate=True)


def play(folder: Path, endpoint: str, key_file: str, server_key: str) -> None:
    """Fetch at each permission in turn; nothing that was fetched is kept between them."""
    from ctxreuse.bus.auth.curve import KeyPair
    from ctxreuse.bus.transport import BusClient
    from ctxreuse.codec import ProfileStore
    from ctxreuse.cost import CostModel, LinkEstimate
    from ctxreuse.engines.torch_hf import TorchEngine
    from ctxreuse.engines.torch_hf.fidelity import score
    from ctxreuse.peer.fetch.clouds import CloudPool
    from ctxreuse.runtime import Runtime, RuntimeOptions

    report("doing", what="a third device loads the model")
    engine = TorchEngine.open("smollm2", reserve=_ROOM)
    if engine.codec.profile is None:
        calibrate(engine)
    ids, size, space = prompt_ids(folder, engine), engine.space.block_tokens, engine.space
    stored = (len(ids) - _SCORED) // size * size
    context = engine.new_context(len(ids))
    engine.prefill(context, ids[:stored])
    report("doing", what="it computes the handbook once, to compare with")
    exact = score(engine, context, ids[stored:])
    estimate, cost = LinkEstimate(), CostModel()
    Runtime(engine, None, RuntimeOptions(cost=cost)).calibrate()
    with BusClient(
        endpoint,
        ClientOptions(
            keys=KeyPair.read(key_file),
            server_key=bytes.fromhex(server_key),
            name="cloud",
            models=[space],
            estimate=estimate,
        ),
    ) as client:
        clouds = CloudPool([(client, estimate)], profiles=ProfileStore())
        _until_known(client, engine, ids[:stored])
        for max_kl in permissions([info.name for info in engine.codec.levels if info.lossy]):
            report("doing", what=f"it fetches: {limit_name(max_kl) or 'exact'} is allowed")
            runtime = Runtime(engine, None, RuntimeOptions(remote=clouds, cost=cost))
            at = time.perf_counter()
            # One token more than the blocks: a prompt has a last token that is computed.
            done = runtime.prefill(runtime.request(ids[: stored + 1], max_kl=max_kl))
            seconds = time.perf_counter() - at
            engine.crop(done.context, stored)
            assert isinstance(done.context, type(context))
            found = score(engine, done.context, ids[stored:]).against(exact)
            usage = done.usage
            levels = [family(level) for level, tokens in usage.tokens.by_level.items() if tokens]
            report(
                "level",
                allowed=limit_name(max_kl) or "exact",
                levels=levels or ["computed"],
                seconds=seconds,
                nbytes=usage.fetched_bytes,
                fetched=usage.tokens.by_source.get("cloud", 0),
                prompt=stored,
                kl=found.kl,
                top1=found.top1,
                scored=len(ids) - stored - 1,
            )


def _until_known(client: BusClient, engine: TorchEngine, ids: Tokens) -> None:
    from ctxreuse.identity.keys import prefix_keys

    end = time.monotonic() + _WAIT
    while True:
        greeting = client.welcome
        if greeting is not None and client.state == "up":
            keys = prefix_keys(engine.space.digest, greeting.salt, ids, engine.space.block_tokens)
            if client.announced(keys) == len(keys):
                return
        if time.monotonic() > end:
            raise LinkDownError("the third device received no announcement of blocks", where=client.reason)
        time.sleep(0.02)


def main(arguments: Sequence[str]) -> int:
    """FOLDER ENDPOINT KEY_FILE SERVER_KEY."""
    folder, endpoint, key_file, server_key = arguments
    try:
        play(Path(folder), endpoint, key_file, server_key)
    except CtxReuseError as error:
        report("failed", error=type(error).__name__, what=error.what, where=error.where, fix=error.fix)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
