"""The HTTP server against a scripted engine: shapes, limits, errors, and who is aborted when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient, TestServer

from tests.support.fake_engine import MAX_CONTEXT, START, VOCAB_SIZE, FakeEngine, Script
from tierkv.engine.serve.api import ApiOptions, ApiServer
from tierkv.engine.serve.api_answer import tierkv_body
from tierkv.engine.serve.api_schema import PROMPTS_MAX, SALT_CHARS_MAX, STOPS_MAX
from tierkv.engine.serve.api_stream import merge
from tierkv.engine.serve.planner import Plan
from tierkv.engine.serve.request import CachedTokens, FinishReason, RequestOutput
from tierkv.engine.serve.sampler import SamplingParams
from tierkv.storage.errors import RequestError, TierIOError

Client = TestClient[web.Request, web.Application]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


class FixedClock:
    """The same moment for ever."""

    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1_700_000_000.5


@asynccontextmanager
async def client_of(
    engine: FakeEngine, options: ApiOptions | None = None
) -> AsyncIterator[tuple[Client, ApiServer]]:
    server = ApiServer(engine, options or ApiOptions(), FixedClock())
    async with TestClient(TestServer(server.app(), handler_cancellation=True)) as client:
        yield client, server
        server.check()


async def post(
    body: dict[str, Any] | bytes | str,
    *scripts: Script,
    path: str = COMPLETIONS,
    options: ApiOptions | None = None,
) -> tuple[int, dict[str, Any], FakeEngine]:
    """One request to a fresh server: status, body and the engine afterwards."""
    engine = FakeEngine(*scripts)
    async with client_of(engine, options) as (client, _):
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        async with client.post(path, data=data) as response:
            return response.status, await response.json(), engine


async def events_of(
    body: dict[str, Any], *scripts: Script, path: str = COMPLETIONS
) -> list[dict[str, Any]]:
    """Every object of a streamed answer; asserts the frame and the closing mark."""
    async with client_of(FakeEngine(*scripts)) as (client, _):
        async with client.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            frames = (await response.text()).split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


# Whole answers


async def test_completion_has_openai_shape_and_tier_detail() -> None:
    script = Script(cached=CachedTokens(gpu=1, host=2, nvme=3))
    status, body, engine = await post({"prompt": "abcdefgh", "model": "tiny"}, script)
    assert status == 200
    assert body.pop("id").startswith("cmpl-")
    assert body == {
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 6},
        },
        "tierkv": {
            "cached_tokens": {"gpu": 1, "host": 2, "nvme": 3, "remote": 0},
            "ttft_s": 0.5,
            "queued_s": 0.25,
            "plans": [],
        },
    }
    assert engine.calls[0].prompt == [START, *b"abcdefgh"]


def test_the_plan_of_a_restore_is_told_beside_what_came_of_it() -> None:
    output = RequestOutput(
        request_id=1,
        prompt_token_ids=(1,) * 100,
        token_ids=(2,),
        text="",
        finish_reason=FinishReason.LENGTH,
        cached=CachedTokens(gpu=16, nvme=48),
        queued_s=0.0,
        ttft_s=0.5,
        total_s=0.6,
        plan=Plan(32, 48, 0.25, 0.7, 0.4),
    )
    assert tierkv_body([output])["plans"] == [
        {
            "compute_tokens": 32,
            "load_tokens": 48,
            "expected_s": 0.25,
            "compute_all_s": 0.7,
            "load_all_s": 0.4,
            "loaded_tokens": 48,
        }
    ]


async def test_chat_has_openai_shape() -> None:
    status, body, engine = await post({"messages": HELLO}, path=CHAT)
    assert status == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert engine.calls[0].prompt == list(b"user:hi;")
    assert engine.calls[0].params.max_tokens == MAX_CONTEXT - len("user:hi;")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[START, 97, 98]]),
        (["a", "b"], [[START, 97], [START, 98]]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
async def test_every_form_of_prompt_reaches_the_engine(prompt: Any, expected: Any) -> None:
    status, body, engine = await post({"prompt": prompt})
    assert status == 200
    assert sorted(call.prompt for call in engine.calls) == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_choices_keep_the_order_of_prompts_not_of_completion() -> None:
    slow, quick = Script(pieces=("s",), hold_before=0), Script(pieces=("q",))
    engine = FakeEngine(slow, quick)
    async with client_of(engine) as (client, _):
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(_json(client, {"prompt": ["a", "b"]}))
            await quick.closed.wait()
            slow.go.set()
        assert [choice["text"] for choice in answer.result()["choices"]] == ["s", "q"]


async def test_parameters_reach_the_engine() -> None:
    body = {
        "prompt": "a",
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 11,
        "stop": ["x", "yy"],
        "ignore_eos": True,
        "cache_salt": "tenant",
        "priority": -2,
        "user": "somebody",
        "n": 1,
        "frequency_penalty": 0.0,
        "a_field_from_the_future": {"x": 1},
    }
    status, _, engine = await post(body)
    call = engine.calls[0]
    assert status == 200
    assert (call.params.max_tokens, call.params.temperature, call.params.top_p) == (7, 0, 0.5)
    assert (call.params.top_k, call.params.seed, call.params.ignore_eos) == (3, 11, True)
    assert (call.stop, call.cache_salt, call.priority) == (("x", "yy"), "tenant", -2)


async def test_silent_client_gets_openai_defaults() -> None:
    _, _, engine = await post({"prompt": "a", "top_k": -1, "stop": None})
    params = engine.calls[0].params
    assert (params.max_tokens, params.temperature, params.top_p) == (16, 1.0, 1.0)
    assert (params.top_k, params.seed, engine.calls[0].stop) == (0, None, ())


async def test_chat_template_gets_tools_parts_and_decoded_tool_calls() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    status, _, engine = await post(
        {"messages": messages, "tools": tools, "max_tokens": 9, "max_completion_tokens": 4},
        path=CHAT,
    )
    assert status == 200
    seen, seen_tools = engine.chat.seen[0]
    assert seen_tools == tools
    assert [message["content"] for message in seen] == ["ab", "", "1"]
    assert seen[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert seen[2]["tool_call_id"] == "1"
    assert engine.calls[0].params.max_tokens == 4


async def test_tool_choice_none_hides_tools() -> None:
    body = {"messages": HELLO, "tools": [{"type": "function"}], "tool_choice": "none"}
    _, _, engine = await post(body, path=CHAT)
    assert engine.chat.seen[0][1] is None


# Streams


async def test_completion_stream() -> None:
    events = await events_of({"prompt": "a"})
    assert [event["choices"][0]["text"] for event in events] == ["Hel", "lo", ""]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["tierkv"]["ttft_s"] == 0.5
    assert all("usage" not in event for event in events)


async def test_chat_stream_opens_with_the_role_and_ends_with_usage() -> None:
    body = {"messages": HELLO, "stream_options": {"include_usage": True}}
    script = Script(cached=CachedTokens(nvme=5))
    events = await events_of(body, script, path=CHAT)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    assert events[-1]["tierkv"]["cached_tokens"]["nvme"] == 5


async def test_stream_of_several_prompts_names_each_choice() -> None:
    body = {"prompt": ["a", "b"], "stream_options": {"include_usage": True}}
    events = await events_of(body, Script(pieces=("1", "2")), Script(pieces=("3",)))
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "12", 1: "3"}
    assert events[-1]["usage"]["completion_tokens"] == 3


async def test_text_beyond_ascii_survives() -> None:
    events = await events_of({"prompt": "a"}, Script(pieces=("né", "", "中\n\n文")))
    assert "".join(event["choices"][0]["text"] for event in events) == "né中\n\n文"


async def test_error_after_the_first_token_travels_as_an_event() -> None:
    script = Script(finish=FinishReason.ERROR, error="the device failed")
    events = await events_of({"prompt": "a"}, script)
    assert events[-1]["error"]["message"] == "the device failed"
    assert events[-1]["error"]["code"] == "engine_error"


async def test_bad_request_of_a_stream_is_still_a_400() -> None:
    script = Script(raises=RequestError("prompt: too long"))
    status, body, _ = await post({"prompt": "a", "stream": True}, script)
    assert (status, body["error"]["message"]) == (400, "prompt: too long")


async def test_h1_silent_engine_ends_in_504_and_frees_the_request() -> None:
    script = Script(hold_before=0)
    status, body, engine = await post(
        {"prompt": "a"}, script, options=ApiOptions(event_timeout_s=0.01)
    )
    assert (status, body["error"]["code"]) == (504, "timeout")
    assert script.closed.is_set() and engine.running == 0


# Aborts


@pytest.mark.parametrize("stream", [False, True])
async def test_h3_client_that_leaves_aborts_its_request(stream: bool) -> None:
    script = Script(hold_before=1)
    engine = FakeEngine(script)
    async with client_of(engine) as (client, server):
        sending = asyncio.create_task(_json(client, {"prompt": "a", "stream": stream}))
        await script.held.wait()
        assert server.in_flight == 1
        sending.cancel()
        async with asyncio.timeout(10):
            await script.closed.wait()
            await server.drain(10)
        assert not script.completed
        assert (engine.running, server.in_flight) == (0, 0)


async def test_h3_client_that_leaves_aborts_all_prompts_of_its_request() -> None:
    scripts = [Script(hold_before=0) for _ in range(3)]
    engine = FakeEngine(*scripts)
    async with client_of(engine) as (client, _):
        sending = asyncio.create_task(_json(client, {"prompt": ["a", "b", "c"]}))
        for script in scripts:
            await script.held.wait()
        sending.cancel()
        async with asyncio.timeout(10):
            for script in scripts:
                await script.closed.wait()
    assert engine.running == 0


async def test_one_failing_prompt_closes_the_others() -> None:
    held = Script(hold_before=0)
    status, _, engine = await post(
        {"prompt": ["a", "b"]}, held, Script(raises=TierIOError("read failed"))
    )
    assert status == 503
    assert held.closed.is_set() and engine.running == 0


async def test_merge_closes_streams_that_were_never_read() -> None:
    scripts = [Script(), Script(hold_before=0)]
    engine = FakeEngine(*scripts)
    async with aclosing(merge([_of(engine), _of(engine)], 5)) as merged:
        assert (await anext(merged))[1].text == "Hel"
    assert engine.running == 0


async def test_drain_waits_for_running_requests_and_refuses_new_ones() -> None:
    script = Script(hold_before=0)
    async with client_of(FakeEngine(script)) as (client, server):
        running = asyncio.create_task(_json(client, {"prompt": "a"}))
        await script.held.wait()
        draining = asyncio.create_task(server.drain(30))
        async with client.post(COMPLETIONS, json={"prompt": "b"}) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "draining"
        async with client.get("/health") as response:
            assert response.status == 503
        script.go.set()
        assert await draining
        assert (await running)["choices"][0]["text"] == "Hello"


async def test_drain_past_its_bound_aborts() -> None:
    script = Script(hold_before=0)
    async with client_of(FakeEngine(script)) as (client, server):
        running = asyncio.create_task(_json(client, {"prompt": "a"}))
        await script.held.wait()
        assert not await server.drain(0.01)
        await script.closed.wait()
        with pytest.raises(ClientError):
            await running


# Refusals


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": 3}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * (PROMPTS_MAX + 1)}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "7"}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed"),
        (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * (STOPS_MAX + 1)}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": "x" * (SALT_CHARS_MAX + 1)}, "cache_salt"),
        (COMPLETIONS, {"prompt": "a", "priority": 2**31}, "priority"),
        (COMPLETIONS, {"prompt": "a", "n": 2}, "n"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "presence_penalty": 0.1}, "presence_penalty"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 5.0}}, "logit_bias"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": HELLO, "logprobs": True}, "logprobs"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_bad_field_is_a_400_that_names_it(path: str, body: Any, param: str) -> None:
    status, answer, engine = await post(body, path=path)
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ") and "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert engine.calls == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'"prompt"', b"null"])
async def test_body_that_is_no_object_is_a_400(raw: bytes) -> None:
    status, answer, _ = await post(raw)
    assert status == 400
    assert answer["error"]["message"].startswith("body: ")


async def test_tool_call_arguments_that_are_not_json_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": "{"}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    status, answer, _ = await post({"messages": messages}, path=CHAT)
    assert (status, answer["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("length", [MAX_CONTEXT, MAX_CONTEXT + 1])
async def test_prompt_longer_than_the_context_is_refused(length: int) -> None:
    status, answer, engine = await post({"prompt": "x" * (length - 1)})
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert str(MAX_CONTEXT) in answer["error"]["message"]
    assert engine.calls == []


async def test_prompt_that_just_fits_is_served() -> None:
    status, _, _ = await post({"prompt": "x" * (MAX_CONTEXT - 2)})
    assert status == 200


async def test_engine_errors_have_the_one_shape() -> None:
    scripts = {
        400: Script(raises=RequestError("refused")),
        503: Script(raises=TierIOError("device failed")),
        500: Script(finish=FinishReason.ERROR, error="broken"),
    }
    for expected, script in scripts.items():
        status, answer, _ = await post({"prompt": "a"}, script)
        assert status == expected
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    status, answer, _ = await post({"prompt": "a"}, Script(finish=FinishReason.ABORT))
    assert (status, answer["error"]["code"]) == (503, "aborted")


async def test_unknown_model_is_a_404() -> None:
    status, answer, _ = await post({"prompt": "a", "model": "other"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_unknown_route_and_method_have_the_one_shape() -> None:
    async with client_of(FakeEngine()) as (client, _):
        async with client.get("/v2/nothing") as response:
            assert (response.status, (await response.json())["error"]["param"]) == (404, None)
        async with client.get(COMPLETIONS) as response:
            assert response.status == 405
            assert "Method Not Allowed" in (await response.json())["error"]["message"]


async def test_body_limit_holds_at_it_and_past_it() -> None:
    body = json.dumps({"prompt": "a"})
    exact = ApiOptions(body_bytes_max=len(body))
    assert (await post(body, options=exact))[0] == 200
    status, answer, _ = await post(body + " ", options=exact)
    assert status == 413
    assert str(len(body)) in answer["error"]["message"]


async def test_request_limit_holds_at_it_and_past_it() -> None:
    scripts = [Script(hold_before=0), Script(hold_before=0)]
    engine = FakeEngine(*scripts)
    async with client_of(engine, ApiOptions(requests_max=2)) as (client, server):
        running = [asyncio.create_task(_json(client, {"prompt": "a"})) for _ in scripts]
        for script in scripts:
            await script.held.wait()
        server.check()
        async with client.post(COMPLETIONS, json={"prompt": "b"}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        for script in scripts:
            script.go.set()
        await asyncio.gather(*running)
        async with client.post(COMPLETIONS, json={"prompt": "b"}) as response:
            assert response.status == 200


async def test_prompts_count_one_by_one_against_the_request_limit() -> None:
    options = ApiOptions(requests_max=2)
    assert (await post({"prompt": ["a", "b"]}, options=options))[0] == 200
    assert (await post({"prompt": ["a", "b", "c"]}, options=options))[0] == 429


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "secret", "Bearer secret2"])
async def test_a1_wrong_key_is_refused_everywhere_but_health(header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with client_of(FakeEngine(), ApiOptions(api_key="secret")) as (client, _):
        for path in ("/v1/models", "/metrics", "/stats", "/nowhere"):
            async with client.get(path, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
        async with client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers) as response:
            assert response.status == 401
            assert "secret" not in await response.text()
        async with client.get("/health", headers=headers) as response:
            assert response.status == 200


async def test_a1_right_key_is_served() -> None:
    async with client_of(FakeEngine(), ApiOptions(api_key="secret")) as (client, _):
        headers = {"Authorization": "Bearer secret"}
        async with client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers) as response:
            assert response.status == 200


# The other routes


async def test_models_health_and_stats() -> None:
    async with client_of(FakeEngine()) as (client, _):
        async with client.get("/v1/models") as response:
            model = (await response.json())["data"][0]
            assert (model["id"], model["max_model_len"]) == ("tiny", MAX_CONTEXT)
        async with client.get("/health") as response:
            assert await response.json() == {"status": "ok"}
        async with client.get("/stats") as response:
            stats = await response.json()
    assert [tier["name"] for tier in stats["store"]["tiers"]] == ["host", "nvme"]
    assert stats["store"]["tiers"][1]["degraded"] == "write: disk full"
    assert stats["store"]["restored_pages"] == {"host": 8}


async def test_h2_health_says_that_the_engine_stopped() -> None:
    engine = FakeEngine()
    engine.stopped = "engine: stopped after 3 failed steps"
    async with client_of(engine) as (client, _):
        async with client.get("/health") as response:
            assert response.status == 503
            assert "3 failed steps" in (await response.json())["reason"]


async def test_p4_metrics_count_answers_tokens_and_tiers() -> None:
    engine = FakeEngine(Script(cached=CachedTokens(host=3)))
    async with client_of(engine) as (client, _):
        await _json(client, {"prompt": "abcd"})
        await _json(client, {"prompt": 1})
        async with client.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            lines = (await response.text()).splitlines()
    for line in (
        'tierkv_http_requests_total{route="/v1/completions",status="200"} 1.0',
        'tierkv_http_requests_total{route="/v1/completions",status="400"} 1.0',
        'tierkv_request_tokens_total{kind="prompt"} 5.0',
        'tierkv_request_cached_tokens_total{tier="host"} 3.0',
        "tierkv_request_ttft_seconds_count 1.0",
        'tierkv_tier_committed_pages{tier="nvme"} 3.0',
        'tierkv_tier_degraded_state{tier="nvme"} 1.0',
        'tierkv_tier_io_errors_total{tier="host"} 6.0',
        'tierkv_store_restored_pages_total{tier="host"} 8.0',
        "tierkv_mover_dropped_jobs_total 4.0",
        "tierkv_pool_free_pages 15.0",
        "tierkv_engine_step_failures_total 8.0",
        "tierkv_offload_dropped_pages_total 3.0",
        "tierkv_restore_late_loads_total 3.0",
        'tierkv_mover_read_bytes_per_second{tier="nvme"} 1e+09',
    ):
        assert line in lines, line


def test_every_metric_name_ends_in_a_unit_or_noun() -> None:
    server = ApiServer(FakeEngine(), ApiOptions())
    text, _ = server._metrics.render()
    names = {line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")}
    assert names and all(name.startswith("tierkv_") for name in names)


async def _json(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    async with client.post(COMPLETIONS, json=body) as response:
        answer: dict[str, Any] = await response.json(content_type=None)
        return answer


def _of(engine: FakeEngine) -> Any:
    return engine.stream([1], SamplingParams())
