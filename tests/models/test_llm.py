"""The chat client against a scripted HTTP endpoint that speaks the chat protocol."""

from __future__ import annotations

import itertools
import json
import logging
import time
import traceback
from types import SimpleNamespace

import pytest
from pydantic import BaseModel
from werkzeug import Request, Response

from ragbuild.core.config import Endpoints, LLMConfig
from ragbuild.core.errors import MissingResource, UsageError
from ragbuild.models.llm import ChatClient, RequestRefused, UnparsedAnswer, _retry_after, _wait, parse_json

_NUMBER = itertools.count()
KEY = "sk-very-secret-0123456789"
ASK = [{"role": "user", "content": "How do I reset it?"}]


class Term(BaseModel):
    name: str
    count: int


def chat(text: str | None, finish: str = "stop", usage: bool = True) -> Response:
    body = {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}],
    }
    if usage:
        body["usage"] = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    return Response(json.dumps(body, ensure_ascii=False), content_type="application/json")


def failure(status: int, message: str = "no", **headers: str) -> Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    body = json.dumps({"error": {"message": message}})
    return Response(body, status=status, headers=names, content_type="application/json")


@pytest.fixture
def endpoint(httpserver):
    """`endpoint(*responses, **config)`: a client whose requests get these responses in turn, and the request bodies."""
    clients = []
    base = f"/{next(_NUMBER)}/v1"  # of its own: a request that an earlier test gave up may still arrive

    def make(*responses: Response, key: str | None = KEY, **config):
        for response in responses:
            httpserver.expect_ordered_request(f"{base}/chat/completions", method="POST").respond_with_response(response)
        client = ChatClient(LLMConfig(**config), Endpoints(httpserver.url_for(base), key))
        clients.append(client)
        return client, lambda: [json.loads(r.get_data()) for r, _ in httpserver.log if r.path.startswith(base)]

    yield make
    for client in clients:
        client.close()


def test_complete_sends_the_configuration_and_counts_tokens(endpoint, httpserver):
    client, bodies = endpoint(chat(" Hold RESET. 按住复位键。 "), model="m1", temperature=0.2, max_tokens=99)
    done = client.complete(ASK)
    assert done.text == "Hold RESET. 按住复位键。"
    assert (done.prompt_tokens, done.completion_tokens, done.retries, done.finish_reason) == (11, 7, 0, "stop")
    assert done.seconds > 0
    assert bodies() == [{"model": "m1", "messages": ASK, "temperature": 0.2, "max_tokens": 99}]
    assert httpserver.log[-1][0].headers["Authorization"] == f"Bearer {KEY}"


def test_missing_usage_is_none_and_an_empty_answer_is_empty(endpoint):
    client, _ = endpoint(chat(None, finish="length", usage=False))
    done = client.complete(ASK)
    assert (done.text, done.prompt_tokens, done.completion_tokens, done.finish_reason) == ("", None, None, "length")


def test_what_a_reasoning_model_says_to_itself_is_left_out(endpoint):
    client, _ = endpoint(chat("<think>\nThe user wants…\n</think>\n\nHold RESET. Not <think>."))
    assert client.complete(ASK).text == "Hold RESET. Not <think>."


def test_429_then_500_then_an_answer(endpoint, caplog):
    client, bodies = endpoint(
        failure(429, f"slow down, {KEY}", retry_after="0"), failure(500, retry_after="0"), chat("yes"), retries=2
    )
    with caplog.at_level(logging.DEBUG, logger="ragbuild"):
        done = client.complete(ASK)
    assert (done.text, done.retries, len(bodies())) == ("yes", 2, 3)
    assert "HTTP 429" in caplog.text and "request 3 follows" in caplog.text
    assert KEY not in caplog.text and "***" in caplog.text


def test_500s_to_the_end_are_a_missing_resource(endpoint):
    client, bodies = endpoint(*[failure(503, f"down {KEY}", retry_after="0")] * 3, retries=2)
    with pytest.raises(MissingResource) as caught:
        client.complete(ASK)
    assert len(bodies()) == 3
    assert caught.value.exit_code == 5
    assert "RAGBUILD_LLM_BASE_URL" in str(caught.value) and "3 request(s)" in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert KEY not in shown and caught.value.__context__ is None


def test_a_wait_of_hours_is_not_waited_for(endpoint):
    client, bodies = endpoint(failure(429, retry_after="7200"), retries=3)
    with pytest.raises(MissingResource, match="429"):
        client.complete(ASK)
    assert len(bodies()) == 1


def test_retry_after_is_honoured(endpoint):
    client, _ = endpoint(failure(429, retry_after="0.3"), chat("yes"))
    started = time.perf_counter()
    done = client.complete(ASK)
    assert done.retries == 1 and done.seconds >= 0.3
    assert time.perf_counter() - started >= 0.3


def test_retry_after_reads_seconds_and_http_dates():
    def error(value: str | None) -> Exception:
        failed = Exception()
        failed.response = SimpleNamespace(headers={} if value is None else {"retry-after": value})
        return failed

    assert _retry_after(Exception()) is None
    assert _retry_after(error(None)) is None
    assert _retry_after(error("soon")) is None
    assert _retry_after(error("12")) == 12.0
    assert _retry_after(error("-3")) == 0.0
    assert _retry_after(error("Wed, 21 Oct 2015 07:28:00 GMT")) == 0.0
    assert _retry_after(error("Wed, 21 Oct 2215 07:28:00 GMT")) > 1e6


def test_waits_grow_exponentially_with_jitter():
    for attempt, least in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (9, 20.0)):
        state = SimpleNamespace(attempt_number=attempt, outcome=SimpleNamespace(exception=Exception))
        assert all(least <= _wait(state) <= min(least + 0.5, 20.0) for _ in range(20))


def test_a_time_out_is_tried_again_then_reported(httpserver):
    def slow(_: Request) -> Response:
        time.sleep(0.6)
        return chat("too late")

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(slow)
    config = LLMConfig(timeout_s=0.2, retries=1)
    client = ChatClient(config, Endpoints(httpserver.url_for("/v1"), KEY))
    with client, pytest.raises(MissingResource, match="APITimeoutError") as caught:
        client.complete(ASK)
    assert "2 request(s)" in str(caught.value) and "llm.timeout_s" in str(caught.value)


def test_nobody_listens(httpserver):
    gone = httpserver.url_for("/v1")
    httpserver.stop()
    try:
        client = ChatClient(LLMConfig(retries=0), Endpoints(gone, KEY))
        with client, pytest.raises(MissingResource, match="APIConnectionError") as caught:
            client.complete(ASK)
    finally:
        httpserver.start()
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error", "word"),
    [(400, RequestRefused, "rerank.top_m"), (401, MissingResource, "RAGBUILD_LLM_API_KEY"),
     (403, MissingResource, "RAGBUILD_LLM_API_KEY"), (404, MissingResource, "llm.model"), (422, RequestRefused, "422")],
)  # fmt: skip
def test_other_4xx_are_not_tried_again(endpoint, status, error, word):
    client, bodies = endpoint(failure(status, f"bad request with {KEY}", retry_after="0"), retries=3)
    with pytest.raises(error) as caught:
        client.complete(ASK)
    assert len(bodies()) == 1
    assert word in str(caught.value) and KEY not in str(caught.value)


@pytest.mark.parametrize(
    "response",
    [
        Response("<html>Welcome</html>", content_type="text/html"),
        Response("{broken", content_type="application/json"),
        Response('{"hello": 1}', content_type="application/json"),
        Response('{"choices": []}', content_type="application/json"),
    ],
)
def test_an_endpoint_that_speaks_something_else(endpoint, response):
    client, _ = endpoint(response, retries=0)
    with pytest.raises(MissingResource, match="chat protocol.*v1"):
        client.complete(ASK)


def test_no_endpoint_and_bad_addresses():
    with pytest.raises(MissingResource, match="RAGBUILD_LLM_BASE_URL"):
        ChatClient(LLMConfig(), Endpoints())
    for bad in ("localhost:8000", "ftp://host/v1", "http://", "http://[::1/v1", "http://u:pw@host/v1"):
        with pytest.raises(UsageError, match="RAGBUILD_LLM_BASE_URL") as caught:
            ChatClient(LLMConfig(), Endpoints(bad))
        assert "pw" not in str(caught.value).replace("password", "")
    with pytest.raises(UsageError, match="RAGBUILD_LLM_API_KEY"):
        ChatClient(LLMConfig(), Endpoints("http://host/v1", "sk-1\n"))


def test_repr_shows_neither_key_nor_query():
    with ChatClient(LLMConfig(model="m1"), Endpoints("http://[::1]:80/v1?k=hidden", KEY)) as client:
        assert repr(client) == "ChatClient(model='m1', endpoint='http://[::1]:80/v1')"


def test_json_in_a_fence_with_prose_and_a_trailing_comma(endpoint):
    client, bodies = endpoint(chat('Here you are:\n```json\n{"name": "单点登录", "count": 3,}\n```\nAnything else?'))
    record, done = client.complete_json(ASK, Term)
    assert record == Term(name="单点登录", count=3)
    assert done.retries == 0
    asked = bodies()[0]["messages"][-1]["content"]
    assert asked.startswith(ASK[0]["content"]) and '"count"' in asked
    assert ASK == [{"role": "user", "content": "How do I reset it?"}]  # not mutated


def test_broken_json_is_shown_to_the_model_once(endpoint):
    client, bodies = endpoint(chat('{"name": "SSO", "count": "many"}'), chat('{"name": "SSO", "count": 2}'))
    record, done = client.complete_json(ASK, Term)
    assert record == Term(name="SSO", count=2)
    assert (done.prompt_tokens, done.completion_tokens, done.retries) == (22, 14, 1)
    second = bodies()[1]["messages"]
    assert [m["role"] for m in second] == ["user", "assistant", "user"]
    assert second[1]["content"] == '{"name": "SSO", "count": "many"}'
    assert "count: Input should be a valid integer" in second[2]["content"]


def test_json_that_never_comes_is_an_unparsed_answer(endpoint):
    client, bodies = endpoint(chat("I'd rather not."), chat("Still no.", finish="length"))
    with pytest.raises(UnparsedAnswer, match="Still no.*llm.max_tokens") as caught:
        client.complete_json(ASK, Term)
    assert len(bodies()) == 2
    assert caught.value.completion is not None and caught.value.completion.completion_tokens == 14


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "a", "count": 1}',
        '[{"name": "a", "count": 1}]',
        'First {not this}. ```\n{"name": "a", "count": 1}\n```',
        '```json\n{"wrong": 1}\n```\n```json\n{"name": "a", "count": 1}\n```',
        "{name: 'a', count: 1",
        '{"name": "a", "count": 1',
        'Answer: {"name": "a", "count": 1} ({"x"})',
        '{"parts": [{"name": "part", "count": 9}], "name": "a", "count": 1',
    ],
)
def test_parse_json_tolerates(text):
    assert parse_json(text, Term) == Term(name="a", count=1)


@pytest.mark.parametrize("text", ["", "   ", "no", "[]", "[1, 2]", '"a"', "{", "[" * 5000, '{"name": 1}'])
def test_parse_json_refuses(text):
    with pytest.raises(UnparsedAnswer, match="Term"):
        parse_json(text, Term)
