"""The MCP server, asked by the protocol's own client: real processes over standard input and output, and over HTTP."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest
from ctxreuse_agents import Memory
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from support.mcp_clients import COMMAND, call, every, http, refusal, stdio

pytestmark = [pytest.mark.daemon, pytest.mark.slow]


def test_a_memory_over_stdio(tmp_path: Path) -> None:
    async def story() -> None:
        async with stdio(tmp_path / "memory") as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert {"remember", "recall", "list", "forget", "fork", "why", "read_graph"} <= tools.keys()
            assert tools["recall"].annotations is not None
            assert tools["recall"].annotations.read_only_hint
            kept = await call(client, "remember", text="My dog is called Rex.", namespace="ann/cook", meta={"k": 1})
            await call(client, "remember", text="I have a dog, too.", namespace="bob")
            found = (await call(client, "recall", query="dogs", namespace="ann", explain=True))["found"]
            assert [one["text"].split("\n")[1] for one in found] == ["My dog is called Rex."]
            assert found[0]["explain"]["words"]["rank"] == 1
            assert (await call(client, "recall", query="dogs", where={"k": 1}))["found"][0]["id"] == kept["id"]
            why = await call(client, "why", session=kept["id"], query="dog")
            assert why["found"][0]["why"]["words"]["terms"] == ["dog"]
            fork = await call(client, "fork", session=kept["id"], name="branch")
            await call(client, "remember", text="Rex is old.", session="branch")
            turns = (await call(client, "list", session="branch"))["turns"]
            assert [turn["text"] for turn in turns] == ["My dog is called Rex.", "Rex is old."]
            await call(client, "forget", session="branch", turn=turns[0]["turn"])
            assert len(await every(client, "list", "turns", session=fork["id"])) == 1
            await call(client, "forget", session=kept["id"])
            assert (await call(client, "recall", query="Rex called"))["found"][0]["session"] == "branch"
            assert await refusal(client, "forget", session=kept["id"]) == (
                f"there is no session {kept['id']!r}. Session names can be listed with sessions()"
            )

    asyncio.run(story())
    with Memory.open(tmp_path / "memory") as memory:
        assert {hit.turn.content for hit in memory.search("dog")} == {"I have a dog, too."}


def test_a_memory_in_another_language(tmp_path: Path) -> None:
    async def story() -> None:
        async with stdio(tmp_path / "memory", "--embedder", "multilingual", "--language", "de") as client:
            for text in ("Wir haben die Katzen gefüttert.", "Am Freitag fahre ich mit dem Zug nach Hamburg."):
                await call(client, "remember", text=text)
            [one, *_] = (await call(client, "recall", query="Katze", explain=True))["found"]
            assert one["text"].endswith("Katzen gefüttert.")
            assert one["explain"]["words"]["rank"] == 1
            [one, *_] = (await call(client, "recall", query="When do I travel by train?", explain=True))["found"]
            assert one["text"].endswith("nach Hamburg.")
            assert one["explain"].keys() == {"vectors"}

    asyncio.run(story())
    wrong = [*COMMAND, "--folder", str(tmp_path / "other"), "--language", "klingon"]
    done = subprocess.run(wrong, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "there is no language 'klingon'" in done.stderr


def test_resources_are_sessions_and_their_turns(tmp_path: Path) -> None:
    async def story() -> None:
        with http(tmp_path / "memory") as (url, _):
            async with Client(url) as client:
                for n in range(105):
                    await call(client, "remember", text=f"text {n}", session=f"a b/{n % 103}" if n else "")
        return

    async def reading() -> None:
        async with stdio(tmp_path / "memory") as client:
            first = await client.list_resources()
            assert len(first.resources) == 101
            assert first.next_cursor
            rest = await client.list_resources(cursor=first.next_cursor)
            assert len(rest.resources) == 4
            text = (await client.read_resource("memory://sessions/a%20b%2F1")).contents[0].text  # type: ignore[union-attr]
            assert '"text 1"' in text
            assert '"text 104"' in text
            assert '"next":"100"' in (await client.read_resource("memory://sessions")).contents[0].text  # type: ignore[union-attr]
            for uri in ("memory://sessions/nowhere", "memory://other", "file:///etc/passwd", "memory://sessions/../x"):
                with pytest.raises(Exception, match="there is no"):
                    await client.read_resource(uri)

    asyncio.run(story())
    asyncio.run(reading())


def test_the_tools_of_the_reference_memory_server(tmp_path: Path) -> None:
    ann = {"name": "Ann", "entityType": "person", "observations": ["likes rice", "likes rice"]}
    bob = {"name": "B++", "entityType": "person", "observations": []}
    likes = {"from": "B++", "to": "Ann", "relationType": "likes"}
    back = {"from": "Ann", "to": "B++", "relationType": "knows"}

    async def story() -> None:
        async with stdio(tmp_path / "memory", "--tools", "graph") as client:
            assert "remember" not in {tool.name for tool in (await client.list_tools()).tools}
            assert len((await call(client, "create_entities", entities=[ann, bob]))["entities"]) == 2
            assert (await call(client, "create_entities", entities=[ann]))["entities"] == []
            assert (await call(client, "create_relations", relations=[likes, back]))["relations"] == [likes, back]
            assert (await call(client, "create_relations", relations=[likes]))["relations"] == []
            added = [{"entityName": "Ann", "contents": ["likes rice", "has a boat"]}]
            result = await call(client, "add_observations", observations=added)
            assert result["results"] == [{"entityName": "Ann", "addedObservations": ["has a boat"]}]
            graph = await call(client, "read_graph")
            assert graph["entities"][0] == {**ann, "observations": ["likes rice", "has a boat"]}
            assert sorted(map(str, graph["relations"])) == sorted(map(str, [likes, back]))
            first = await call(client, "read_graph", limit=1)
            assert len(first["entities"]) == 1
            assert len((await call(client, "read_graph", limit=1, cursor=first["next"]))["entities"]) == 1
            assert (await call(client, "search_nodes", query="boats"))["entities"][0]["name"] == "Ann"
            assert (await call(client, "open_nodes", names=["B++", "C"]))["relations"] == [likes]
            gone = [{"entityName": "Ann", "observations": ["likes rice"]}]
            await call(client, "delete_observations", deletions=gone)
            await call(client, "delete_relations", relations=[likes])
            await call(client, "delete_entities", entityNames=["B++"])
            expected = {"entities": [{**ann, "observations": ["has a boat"]}], "relations": []}
            assert await call(client, "read_graph") == expected
            assert "there is no entity" in await refusal(client, "create_relations", relations=[likes])

    asyncio.run(story())


def test_ten_servers_of_ten_clients_share_one_memory(tmp_path: Path) -> None:
    async def one(number: int) -> None:
        async with stdio(tmp_path / "memory") as client:
            for n in range(5):
                await call(client, "remember", text=f"note {number} {n}", namespace=f"user{number}")
                await call(client, "remember", text=f"said {number} {n}", session="common")

    async def story() -> None:
        async with asyncio.timeout(300):
            await asyncio.gather(*(one(number) for number in range(10)))

    asyncio.run(story())
    with Memory.open(tmp_path / "memory") as memory:
        assert len(memory.sessions(prefix="memory-")) == 50
        said = [turn.content for turn in memory.session("common", create=False).turns()]
        assert sorted(said) == sorted(f"said {number} {n}" for number in range(10) for n in range(5))


def test_a_server_that_is_killed_loses_nothing_acknowledged_and_another_goes_on(tmp_path: Path) -> None:
    folder, kept = tmp_path / "memory", list[str]()

    async def one(client: Client, number: int) -> None:
        for n in range(12):
            text = f"note {number} {n}"
            await call(client, "remember", text=text)
            kept.append(text)

    async def story() -> None:
        with http(folder) as (url, owner):
            async with asyncio.timeout(300), stdio(folder) as first, stdio(folder) as second:
                await call(first, "list")  # by way of the owner
                await call(second, "list")
                work = [asyncio.ensure_future(one(client, n)) for n, client in enumerate((first, second))]
                while len(kept) < 6:
                    await asyncio.sleep(0.01)
                owner.send_signal(signal.SIGKILL)
                await asyncio.gather(*work)
                assert len(await every(second, "list", "sessions", limit=7)) == 24
        assert url

    asyncio.run(story())
    assert len(kept) == 24
    with Memory.open(folder) as memory:
        texts = [memory.session(session.id).turns()[0].content for session in memory.sessions()]
        assert sorted(texts) == sorted(kept), "each once"


def test_ten_clients_of_one_http_server(tmp_path: Path) -> None:
    async def one(url: str, number: int) -> None:
        async with Client(url) as client:
            for n in range(5):
                await call(client, "remember", text=f"note {number} {n}", session="common")
            assert len((await call(client, "recall", query="note", tokens=4000, limit=100))["found"]) >= 5

    async def story() -> None:
        with http(tmp_path / "memory") as (url, _):
            await asyncio.gather(*(one(url, number) for number in range(10)))
            async with Client(url) as client:
                assert len(await every(client, "list", "turns", session="common", limit=7)) == 50

    asyncio.run(story())


def test_texts_come_back_as_they_are_and_errors_have_no_paths(tmp_path: Path) -> None:
    texts = ["<script>alert(1)</script>", "\x00\x1b[31mred\x07\r\n", "]]>&amp;\u202e", '"},{"x":"', "\U0001f600"]

    async def story() -> None:
        async with stdio(tmp_path / "memory") as client:
            for text in texts:
                await call(client, "remember", text=text, session="odd")
            assert [turn["text"] for turn in (await call(client, "list", session="odd"))["turns"]] == texts
            said = [
                await refusal(client, "nothing"),
                await refusal(client, "remember", text=""),
                await refusal(client, "remember", text="x", path="/etc/passwd"),
                await refusal(client, "remember", text="x", namespace="../../etc"[:1] + "\n"),
                await refusal(client, "remember", text="x", session="a\x1b[0m"),
                await refusal(client, "list", session="../../etc/passwd"),
                await refusal(client, "list", cursor="-1"),
                await refusal(client, "list", limit=10**9),
                await refusal(client, "recall", query="x" * 9000),
                await refusal(client, "why", session="odd"),
                await refusal(client, "remember", text="x", ttl_seconds=-1),
            ]
            assert not [text for text in said if str(tmp_path) in text or "\x1b" in text]

    asyncio.run(story())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory"]


def test_keys_are_required_over_http(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    keys.chmod(0o600)

    async def story(url: str) -> None:
        import httpx2

        known = httpx2.AsyncClient(headers={"Authorization": "Bearer a-key-of-some-length"})
        async with known, Client(streamable_http_client(url, http_client=known)) as client:
            await call(client, "remember", text="secret")
        with pytest.raises(Exception):  # noqa: B017
            async with Client(url) as client:
                await client.list_tools()

    with http(tmp_path / "memory", "--keys", str(keys)) as (url, _):
        asyncio.run(story(url))
    refused = [*COMMAND, "--folder", str(tmp_path / "other"), "--http", "0.0.0.0:0"]
    done = subprocess.run(refused, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "can be reached from other machines" in done.stderr
