"""mem0's calls on a memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ctxreuse_agents import Memory
from ctxreuse_agents.adapters import Mem0Memory

from ctxreuse.errors import ConfigError, SessionError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "I keep two dogs and a parrot."},
    {"role": "assistant", "content": "Noted: two dogs, one parrot."},
]


def texts(found: dict) -> list[str]:
    return [one["memory"] for one in found["results"]]


def test_facts_are_added_found_changed_and_deleted(memory: Memory) -> None:
    facts = Mem0Memory(memory)
    added = facts.add(TALK, user_id="anna", metadata={"topic": "pets"})["results"]
    assert [(one["memory"], one["event"]) for one in added] == [
        (TALK[1]["content"], "ADD"),
        (TALK[2]["content"], "ADD"),
    ]
    facts.add("I keep a dog, too.", user_id="bert")
    assert texts(facts.search("dog", user_id="anna"))[0] in (TALK[1]["content"], TALK[2]["content"])
    assert texts(facts.search("dog", filters={"user_id": "bert"})) == ["I keep a dog, too."]
    assert texts(facts.search("dog", filters={"user_id": "anna", "topic": "cars"})) == []
    one = facts.get(added[0]["id"])
    assert one is not None
    assert (one["memory"], one["metadata"], one["user_id"]) == (TALK[1]["content"], {"topic": "pets"}, "anna")
    facts.update(added[0]["id"], data="I keep three dogs.")
    assert facts.get(added[0]["id"])["memory"] == "I keep three dogs."  # type: ignore[index]
    assert texts(facts.search("three", user_id="anna")) == ["I keep three dogs."]
    assert texts(facts.search("parrot", user_id="anna")) == [TALK[2]["content"]]
    assert [one["event"] for one in facts.history(added[0]["id"])] == ["ADD", "UPDATE"]
    assert facts.history(added[0]["id"])[1]["old_memory"] == TALK[1]["content"]
    facts.delete(added[0]["id"])
    assert facts.get(added[0]["id"]) is None
    assert [(one["event"], one["new_memory"]) for one in facts.history(added[0]["id"])][-1] == ("DELETE", None)
    assert texts(facts.get_all(user_id="anna")) == [TALK[2]["content"]]
    facts.delete_all(user_id="anna")
    assert texts(facts.get_all(user_id="anna")) == []
    facts.reset()
    assert memory.sessions() == []


def test_scores_are_between_0_and_1_and_limits_hold(memory: Memory) -> None:
    facts = Mem0Memory(memory)
    for number in range(12):
        facts.add(f"The boiler {'boiler ' * number} was serviced in {2010 + number}.", user_id="anna")
    found = facts.search("boiler serviced", user_id="anna", top_k=5)["results"]
    assert len(found) == 5
    assert all(0.0 < one["score"] < 1.0 for one in found)
    assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
    best = found[0]["score"]
    assert all(one["score"] >= best for one in facts.search("boiler", user_id="anna", threshold=best)["results"])
    assert len(facts.get_all(user_id="anna", limit=3)["results"]) == 3


@pytest.mark.parametrize("id", ["a/b", "../x", "ü", " spaced ", "-", "a" * 900, "x\0y", "%2f"])
def test_ids_may_be_any_text_and_do_not_meet(memory: Memory, id: str) -> None:
    facts = Mem0Memory(memory)
    facts.add("of one", user_id=id)
    facts.add("of another", user_id=id + "x")
    facts.add("of a run", user_id=id, run_id="r")
    facts.add("of an agent", agent_id=id)
    assert sorted(texts(facts.get_all(user_id=id))) == ["of a run", "of one"]
    assert texts(facts.search("of", user_id=id, run_id="r")) == ["of a run"]
    assert texts(facts.search("of", agent_id=id)) == ["of an agent"]


def test_what_cannot_be_is_refused(memory: Memory) -> None:
    facts = Mem0Memory(memory)
    wrong: list[Callable[[], object]] = [
        lambda: facts.add("x"),
        lambda: facts.add("x", user_id=""),
        lambda: facts.add([{"role": "user"}], user_id="a"),
        lambda: facts.add(5, user_id="a"),  # type: ignore[arg-type]
        lambda: facts.add("x", user_id="a", expiration_date="soon"),
        lambda: facts.search("x"),
        lambda: facts.get_all(),
    ]
    for call in wrong:
        with pytest.raises(ConfigError):
            call()
    for missing in (lambda: facts.update("nothing", "x"), lambda: facts.delete("nothing")):
        with pytest.raises(SessionError):
            missing()
    assert facts.get("nothing") is None
    assert facts.history("nothing") == []


def test_a_model_is_called_only_where_one_is_given(memory: Memory) -> None:
    seen: list[object] = []

    def extract(messages: list[dict]) -> list[str]:
        seen.append(messages)
        return ["Has two dogs.", "Has a parrot."]

    facts = Mem0Memory(memory, extract=extract)
    assert texts(facts.add(TALK, user_id="anna")) == ["Has two dogs.", "Has a parrot."]
    assert len(seen) == 1
    facts.add(TALK, user_id="anna", infer=False)
    assert len(seen) == 1


def test_facts_are_no_longer_found_after_their_last_day(memory: Memory) -> None:
    now = [1_800_000_000.0]  # 2027-01-15
    facts = Mem0Memory(memory, clock=lambda: now[0])
    facts.add("The code of the door is 4711.", user_id="anna", expiration_date="2027-01-16")
    assert len(texts(facts.search("door", user_id="anna"))) == 1
    now[0] += 2 * 86_400
    assert texts(facts.search("door", user_id="anna")) == texts(facts.get_all(user_id="anna")) == []
    assert len(texts(facts.search("door", user_id="anna", show_expired=True))) == 1
    now[0] -= 10 * 86_400  # a clock that was wrong
    assert len(texts(facts.search("door", user_id="anna"))) == 1


def test_deleted_facts_are_in_no_file_after_compact(tmp_path: Path) -> None:
    with Memory.open(tmp_path / "m") as memory:
        facts = Mem0Memory(memory)
        id = facts.add("The code is SECRET-88.", user_id="anna")["results"][0]["id"]
        facts.update(id, "The code is SECRET-99.")
        facts.search("code", user_id="anna")
        facts.delete(id)
        memory.compact()
    for file in (tmp_path / "m").rglob("*"):
        assert not file.is_file() or b"SECRET" not in file.read_bytes()


def test_many_threads_add(memory: Memory) -> None:
    both = [Mem0Memory(memory), Mem0Memory(memory)]
    threads = [
        threading.Thread(target=lambda n=n: [both[m % 2].add(f"fact {n} {m}", user_id="anna") for m in range(8)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts(both[0].get_all(user_id="anna"))) == 32
