"""Named contexts: computed ahead, found again by chats, pinned over restarts, deleted with their KV."""

from __future__ import annotations

from typing import Any

import pytest

MANUAL = [{"role": "system", "content": "You know this manual: " + "press the red button twice. " * 12}]


def make(edge: Any, **body: Any) -> Any:
    return edge.http.post("/api/contexts", json={"name": "manual", "messages": MANUAL, **body})


def test_a_chat_goes_on_from_a_context(edge: Any) -> None:
    made = make(edge)
    assert made.status_code == 201
    context = made.json()["context"]
    assert (context["name"], context["turns"], context["pinned"]) == ("manual", 1, False)
    assert context["held"] >= context["tokens"] - 64
    question = {"role": "user", "content": "What do I press?"}
    body = {"temperature": 0, "max_tokens": 8}
    by_name = edge.http.post("/v1/chat/completions", json={"context": "manual", "messages": [question], **body}).json()
    in_full = edge.http.post("/v1/chat/completions", json={"messages": [*MANUAL, question], **body}).json()
    assert by_name["choices"] == in_full["choices"]
    assert by_name["usage"]["prompt_tokens"] == in_full["usage"]["prompt_tokens"]
    assert by_name["usage"]["prompt_tokens_details"]["cached_tokens"] >= context["tokens"] - 64


def test_lists_and_names(edge: Any) -> None:
    make(edge)
    make(edge, name=None, messages=[], text="plain words " * 20)
    listed = edge.http.get("/api/contexts").json()
    assert listed["total"] == 2
    assert len(edge.http.get("/api/contexts?limit=1").json()["contexts"]) == 1
    one = edge.http.get("/api/contexts/manual").json()["context"]
    assert edge.http.get(f"/api/contexts/{one['id']}").json()["context"] == one
    plain = next(c for c in listed["contexts"] if c["id"] != one["id"])
    refused = edge.http.post(
        "/v1/chat/completions", json={"context": plain["id"], "messages": [{"role": "user", "content": "x"}]}
    )
    assert refused.status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/api/contexts", {"name": "manual", "text": "taken"}, 409),
        ("POST", "/api/contexts", {"name": "both", "text": "x", "messages": MANUAL}, 400),
        ("POST", "/api/contexts", {"name": "none"}, 400),
        ("POST", "/api/contexts", {"name": "", "text": "x"}, 400),
        ("POST", "/api/contexts", {"text": 5}, 400),
        ("GET", "/api/contexts/nobody", None, 404),
        ("DELETE", "/api/contexts/nobody", None, 404),
        ("POST", "/api/contexts/nobody/pin", None, 404),
        ("POST", "/api/contexts/manual/fry", None, 404),
        ("GET", "/api/contexts?limit=0", None, 400),
        ("GET", "/api/contexts?limit=x", None, 400),
        ("PUT", "/api/contexts/manual", {}, 405),
    ],
)
def test_slips(edge: Any, method: str, path: str, body: Any, status: int) -> None:
    make(edge)
    assert edge.http.request(method, path, json=body).status_code == status
    assert edge.http.get("/api/contexts").json()["total"] == 1


def test_what_cannot_be_computed_is_not_kept(edge: Any) -> None:
    assert make(edge, messages=[], text="x" * 5000).json()["error"]["code"] == "context_length_exceeded"
    assert edge.http.get("/api/contexts").json()["total"] == 0


def test_a_context_is_stored_in_one_step_after_it_was_computed(edge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A death while it is computed, or between two writes, would leave a name that a retry cannot have."""
    ledger, runtime = edge.node.ledger, edge.node.contexts._runtime
    writes, counts = [], []
    write, warm = ledger._env.write, runtime.warm
    monkeypatch.setattr(ledger._env, "write", lambda work: writes.append(work) or write(work))
    monkeypatch.setattr(runtime, "warm", lambda request: counts.append(ledger.count()) or warm(request))
    assert make(edge).status_code == 201
    assert (counts, len(writes)) == ([0], 1)
    assert make(edge).status_code == 409
    assert len(counts) == 1  # nothing is computed for a name that is taken


def test_pins_hold_and_outlive_the_daemon(serve: Any) -> None:
    edge = serve()
    assert make(edge, pin=True).json()["context"]["pinned"]
    assert make(edge, name="other", messages=[], text="other " * 40, pin=False).status_code == 201
    edge.http.post("/api/contexts/other/pin")
    assert edge.http.post("/api/contexts/other/unpin").json()["context"]["pinned"] is False
    keys = edge.node.runtime.keys(edge.node.contexts.tokens(edge.node.ledger.session("manual")))
    edge.node.contexts.check()
    edge.close()

    edge = serve()
    pinned = {c["name"]: c["pinned"] for c in edge.http.get("/api/contexts").json()["contexts"]}
    assert pinned == {"manual": True, "other": False}
    assert edge.node.store.unpin(keys) == len(keys) > 0
    edge.node.store.pin(keys)
    # A pin on nothing: its file names a session that is gone.
    edge.http.delete("/api/contexts/manual")
    edge.node.contexts.check()


def test_a_broken_file_of_pins_costs_the_pins_only(serve: Any, tmp_path: Any) -> None:
    serve().close()
    (tmp_path / "store" / "pins.json").write_bytes(b"\xff[")
    edge = serve()
    assert make(edge, pin=True).json()["context"]["pinned"]


def test_deleting_forgets_the_kv(edge: Any) -> None:
    make(edge, pin=True)
    edge.node.store.flush()
    before = edge.node.store.stats().blocks
    gone = edge.http.delete("/api/contexts/manual").json()["blocks"]
    assert gone > 0
    assert edge.node.store.stats().blocks == before - gone
    assert edge.http.get("/api/contexts/manual").status_code == 404


def test_deleting_forgets_its_requests_and_says_so(edge: Any) -> None:
    make(edge)
    body = {"context": "manual", "messages": [{"role": "user", "content": "What?"}], "max_tokens": 1}
    chat = edge.http.post("/v1/chat/completions", json=body).json()["id"]
    assert edge.http.get(f"/api/why/{chat}").json()["cached_tokens"] > 0
    edge.http.delete("/api/contexts/manual")
    for why in (f"/api/why/{chat}", "/api/why"):
        answer = edge.http.get(why)
        assert answer.status_code == 404
        assert "Deleting a context or session forgets its requests" in answer.text


def test_status_and_sync_without_clouds(edge: Any) -> None:
    make(edge)
    found = edge.http.get("/api/status").json()
    assert found["contexts"] == 1
    assert found["clouds"] == []
    assert found["store"]["durable"] is True
    assert edge.http.post("/api/sync").json()["enabled"] is False
