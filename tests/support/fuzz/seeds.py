"""Makes the valid inputs of `targets.CORPUS` anew, with the product's own writers: ``python -m support.fuzz.seeds``."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from ctxreuse_cloud.connectors.chunks.place import join_planes

from ctxreuse.block.format import parse
from ctxreuse.codec import lossless
from ctxreuse.dtypes import UNSIGNED
from ctxreuse.engines.text import ToolCall
from ctxreuse.kernels import rans_encode
from ctxreuse.kernels.convert import from_float32
from ctxreuse.store.lmdb.records import Record
from ctxreuse.toolcalls.families import FAMILIES
from support.fuzz import targets
from support.klt_planes import encode_plane

__all__ = ["main"]


def _rans() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    for count in (0, 1, 64, 1000):
        steps = ((np.arange(-(-count // 64)) + 1) % 3).astype(np.uint16)
        symbols = rng.integers(0, 2, count).astype(np.uint8)
        stream = bytes(rans_encode(symbols, targets._tables(), steps))
        yield f"{count}", count.to_bytes(2, "little") + b"\1" + stream


def _lossless() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    for dtype, width, shape in (
        ("float32", 4, (2, 16, 8)), ("bfloat16", 2, (2, 16, 16)), ("float16", 2, (1, 7, 5)), ("float32", 4, (300,)),
        ("uint8", 1, (50,)), ("int64", 8, (2, 3)),
    ):  # fmt: skip
        values = rng.normal(size=shape).astype(np.float32)
        bits = values.view(np.uint32) >> (32 - 8 * min(width, 4))
        yield f"{dtype}-{len(shape)}", bytes(lossless.encode_plane(bits.astype(UNSIGNED[width]), dtype, shape))


def _chunks() -> Iterator[tuple[str, bytes]]:
    """A chunk whose K is near the profile's mean, which is coded, and one of noise, which is packed."""
    codec, shape = targets._chunk_codec()
    (profile,) = codec._profiles.values()
    rng = np.random.default_rng(0)
    kv = rng.normal(size=(2, 2, 3, 32, 16)).astype(np.float32)
    noise = kv.copy()
    for plane in profile.planes:
        mean = np.concatenate([group.mean for group in plane.groups]).reshape(plane.heads, 1, plane.dim)
        kv["kv".index(plane.role), plane.layer] = (
            mean + 0.1 * abs(mean).mean() * kv["kv".index(plane.role), plane.layer]
        )
    kv[0] = profile.ropes[0].rotate(kv[0], np.arange(64, 96))
    for name, (k, v), page in (("rows", kv, 0), ("pages", kv, 16), ("packed", noise, 0)):
        chunk = np.empty(shape.shape, np.uint16)
        join_planes(from_float32(k, shape.dtype), from_float32(v, shape.dtype), chunk, page)
        into = np.zeros(codec.most_bytes(shape), np.uint8)
        count = codec.encode(chunk.reshape(-1).view(np.uint8), shape, bytes(32), into)
        assert parse(into[:count]).header.level.startswith("exact" if name == "packed" else "kl-0.01@")
        yield name, into[:count].tobytes()


def _klt() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(0)

    def coded(coder: Any, rows: Any, *, refinement: bool = False) -> bytes:
        _, tokens, dim = rows.shape
        undo = coder.ropes[0].span_tables(64, tokens, undo=True) if coder.ropes[0] is not None else None
        strides = tokens * dim, dim, 1
        how = {"raw_dtype": "bfloat16", "angles": undo, "refinement": refinement}
        data, _ = encode_plane(coder.native, rows, "float32", 0, strides, [tokens], **how)
        return bytes(data)

    for n, (coder, refined) in enumerate(targets._klt_planes()):
        tokens = (1, 5, 64)[n % 3]
        rows = rng.normal(size=(coder.plane.heads, tokens, coder.plane.dim)).astype(np.float32).view(np.uint32)
        if not refined:
            yield f"{n}", bytes([n, tokens - 1]) + coded(coder, rows)
        else:
            base, more = coded(coder.base, rows), coded(coder, rows, refinement=True)
            yield f"{n}", bytes([n, tokens - 1]) + len(base).to_bytes(2, "little") + base + more


def _talks() -> dict[str, list[list[bytes]]]:
    """What an edge and a cloud say to each other after their hellos, in the scene of the target ``client``."""
    from ctxreuse.bus.protocol.base import PutRequest
    from support import session_pair as pair

    client, server = pair.client_of(), pair.server_of(pair.node())
    client.match(pair.SPACE.digest, pair.KEYS)
    for order in ("layers", "tail"):
        client.fetch(pair.buffer(order=order), payload=4096)
    client.put(PutRequest(pair.SPACE.digest, pair.KEYS, pair.SIZES), lambda i: pair.DATA[i])
    client.fetch(pair.buffer(), compute=True)
    said: dict[str, list[list[bytes]]] = {"server": [], "client": []}
    for _ in range(2000):
        for side, other, name in ((client, server, "server"), (server, client, "client")):
            if (frames := side.next(0.0)) is not None:
                said[name].append([bytes(frame) for frame in frames])
                other.receive(said[name][-1], 0.0)
    return said


def _drafts() -> Iterator[list[bytes]]:
    """What an edge says that has three answers decoded: one drafted rightly, one wrongly, one given up."""
    from ctxreuse.bus.protocol import messages, wire
    from support.counting import SPACE, next_token

    answer = [3]
    for _ in range(20):
        answer.append(next_token(answer[-1]))
    ids = np.array(answer, "<i4")
    drawn = messages.DrawRule(temperature=0.5, top_k=1, seed=3)
    for message in (
        messages.Verify(1, SPACE.digest, ids[:1].tobytes(), 18, 4, (), messages.DrawRule(), ids[1:4].tobytes()),
        messages.Draft(1, 3, ids[4:9].tobytes()),
        messages.Verify(2, SPACE.digest, ids[:6].tobytes(), 9, 8, (int(ids[12]),), drawn),
        messages.Draft(2, 0, ids[5:9].tobytes()),
        messages.Draft(1, 9, ids[10:14].tobytes()),
        messages.Verify(3, SPACE.digest, ids[:2].tobytes(), 200),
        messages.Draft(3, 1, ids[3:9].tobytes()),
        messages.Cancel(3),
        messages.Ping(1),
    ):
        yield wire.encode(message)  # type: ignore[misc]


def _imports() -> Iterator[tuple[str, bytes]]:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "What?", "created": 1.7e9},
        {"role": "assistant", "content": "That, \U0001f600.", "created": 1.7e9, "meta": {"a": [1, None, {"b": 2.5}]}},
        {"role": "tool", "content": "", "created": 0.0, "tokens": {"ab" * 32: "AQAAAAIAAAA=", "cd" * 32: ""}},
    ]
    head = {"format": "ctxreuse.session", "version": 1, "name": "one"}
    yield "turns", json.dumps(head | {"turns": turns}).encode()
    yield "empty", json.dumps(head | {"turns": []}).encode()


def _bodies() -> Iterator[tuple[str, bytes]]:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts, "name": "me"}]
    tuned = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 1, "stop": ["a", "b"], "n": 1}
    more = {"stream": True, "stream_options": {"include_usage": True}, "ctxreuse": {"lossy": "kl-0.01"}}
    yield "chat", b"\0" + json.dumps({"model": "m", "messages": messages, "context": "c"} | tuned | more).encode()
    yield "text", b"\1" + json.dumps({"prompt": ["a", "b"], "max_tokens": 3, "echo": False, "suffix": None}).encode()
    about = {"session": "s", "parts": [["a", 2], ["b", 4]], "opening": "x"}
    asked = {"tokens": [1, 2, 3, 4], "sampling": {"max_tokens": 2}, "branches": [2], "about": about}
    yield "tokens", b"\2" + json.dumps(asked).encode()
    yield "context", b"\3" + json.dumps({"name": "c", "messages": messages, "pin": True}).encode()


def _door_bodies() -> Iterator[tuple[str, bytes]]:
    kept = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    text = {"type": "text", "text": "a"} | kept
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": [1, {"y": "z"}]}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text], "is_error": True}
    document = {"type": "document", "title": "T", "source": {"type": "content", "content": [text]}}
    said = [("user", [text, document]), ("assistant", [call]), ("user", [result, text]), ("user", "b")]
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}
    yield "messages", b"\0" + json.dumps({
        "model": "m", "max_tokens": 3, "system": [text], "tools": [tool], "tool_choice": {"type": "tool", "name": "f"},
        "messages": [{"role": role, "content": content} for role, content in said], "stop_sequences": ["x"],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}, "temperature": 0.5,
    }).encode()  # fmt: skip
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g"}, "id": "t"}]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
    chat += [{"role": "tool", "content": "b", "tool_name": "f"}, {"role": "tool", "content": "c"}]
    options = {"num_predict": 3, "top_k": 4, "stop": ["a"], "temperature": 0.5}
    body = {"model": "m", "messages": chat, "options": options, "format": {"type": "object"}, "keep_alive": "5m"}
    yield "ollama", b"\1" + json.dumps(body).encode()
    yield "embeddings", b"\2" + json.dumps({"input": ["a", "b"], "dimensions": 4, "encoding_format": "base64"}).encode()


def _calls() -> Iterator[tuple[str, bytes]]:
    calls = [ToolCall("look_up", '{"key": "a}\\"b", "n": [1, {"x": null}]}'), ToolCall("né", "{}")]
    for n, family in enumerate(FAMILIES.values()):
        said = "Let me see.\n" if family.begin else ""
        yield family.name, bytes([n, 7]) + (said + family.write(calls)).encode()


def _pages() -> Iterator[tuple[str, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        with lmdb.open(folder, max_dbs=4, map_size=1 << 20) as env:
            meta, blocks = env.open_db(b"meta"), env.open_db(b"blocks")
            with env.begin(write=True) as txn:
                for i in range(30):
                    key, parent = (bytes([n]) * 32 for n in (i, i + 1))
                    record = Record(parent, i, i, 4096 * i, 0, i << 33, "exact", "exact", None)
                    txn.put(key, record.pack(), db=meta)
                    txn.put(key, bytes([i]) * (5000 if i % 10 == 1 else 8), db=blocks)
            with env.begin(write=True) as txn:
                txn.delete(bytes(32), db=meta)
                txn.delete(bytes(32), db=blocks)
        yield "tables", (Path(folder) / "data.mdb").read_bytes()


def _gguf() -> Iterator[tuple[str, bytes]]:
    import gguf

    tokens = ["<s>", "</s>", "a", "b", "ab"]
    shapes = {
        "token_embd": (5, 8), "output_norm": (8,), "blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8), "blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8),
        "blk.0.ffn_down": (8, 16), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,),
    }  # fmt: skip
    for kind in ("llama", "gemma3"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            writer = gguf.GGUFWriter(path, kind)
            for name, value in (
                ("embedding_length", 8), ("feed_forward_length", 16), ("block_count", 1), ("head_count", 2),
                ("head_count_kv", 1), ("context_length", 64), ("layer_norm_rms_eps", 1e-5), ("rope_freq_base", 1e4),
                ("bos_token_id", 0), ("eos_token_id", 1), ("token_list", tokens), ("token_types", [3, 3, 1, 1, 1]),
                ("tokenizer_model", "gpt2" if kind == "llama" else "llama"),
                ("tokenizer_pre", "smollm" if kind == "llama" else "default"),
            ):  # fmt: skip
                getattr(writer, f"add_{name}")(value)
            if kind == "llama":
                writer.add_token_merges(["a b"])
            else:
                writer.add_token_scores([0.0, 0.0, -1.0, -2.0, -3.0])
                writer.add_key_length(4)
                writer.add_sliding_window(8)
            for name, shape in shapes.items():
                writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            yield kind, path.read_bytes()


def main() -> int:
    talks = _talks()
    joined = {name: targets._joined(messages) for name, messages in talks.items()}
    kinds = {frames[0][6]: frames for messages in talks.values() for frames in messages}
    drafts = list(_drafts())
    short = targets._joined([[frames[0], *(frame[:64] for frame in frames[1:])] for frames in talks["server"][:8]])
    made = {
        "chunk": _chunks(), "rans": _rans(), "lossless": _lossless(), "klt": _klt(), "import": _imports(),
        "openai": _bodies(),
        "doors": _door_bodies(), "calls": _calls(), "pages": _pages(),
        "gguf": _gguf(), "server": [("talk", joined["server"]), ("short", short)],
        "client": [("talk", joined["client"]), ("begun", targets._joined(talks["client"][:6]))],
        "wire": [("kinds", targets._joined(list(kinds.values()))), ("answers", targets._joined(drafts))],
        "answers": [("three", targets._joined(drafts))],
    }  # fmt: skip
    for target, inputs in made.items():
        folder = targets.CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in inputs:
            (folder / name).write_bytes(data)
            targets.TARGETS[target].run(data)
            print(f"{target}/{name}: {len(data):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
