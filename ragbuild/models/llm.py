"""A chat endpoint that speaks the OpenAI protocol: retries, time-outs, counted tokens and tolerant JSON.

The address and the key come from the environment (`Endpoints`), all else from `LLMConfig`. The key stands in no
exception, repr or log line: whatever an endpoint sends back is scrubbed before it is shown.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from ragbuild.core.config import Endpoints, LLMConfig
from ragbuild.core.errors import MissingResource, RagbuildError, UsageError
from ragbuild.core.records import Record

R = TypeVar("R", bound=BaseModel)
log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0  # an endpoint that asks for a longer wait than this is given up at once
_THINKING = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)  # what reasoning models say to themselves first
_FENCE = re.compile(r"```[A-Za-z]*[ \t]*\n(.*?)\n[ \t]*```", re.DOTALL)


class Completion(Record):
    """One answer. Token counts are the endpoint's own (None: it sent none); `seconds` includes the waits.

    `retries` counts the requests beyond the first; `finish_reason` is ``length`` when `llm.max_tokens` cut the text.
    """

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    retries: int = 0
    finish_reason: str = ""


class RequestRefused(RagbuildError):
    """The endpoint refuses this request (a 4xx): sending it again would change nothing."""


class UnparsedAnswer(RagbuildError):
    """The model's answer is no JSON of the wanted form, not even at the second try. To be counted, never dropped."""

    def __init__(self, message: str, completion: Completion | None = None) -> None:
        super().__init__(message)
        self.completion = completion


class ChatClient:
    """Sends chats to the endpoint of `Endpoints.llm_base_url`; may be shared by threads.

    Raises MissingResource (exit 5) when no endpoint is set, UsageError when its address is none.
    """

    def __init__(self, config: LLMConfig, endpoints: Endpoints) -> None:
        self.config = config
        self._key = endpoints.llm_api_key
        self._address = _address(endpoints.llm_base_url)
        if self._key and not (self._key.isascii() and self._key.isprintable()):
            raise UsageError("RAGBUILD_LLM_API_KEY holds a character that no HTTP header takes (a line end?)")
        import openai

        # Own retries are off: tenacity does them, so that they are counted and the waits are bounded.
        self._client = openai.OpenAI(
            base_url=endpoints.llm_base_url, api_key=self._key or "none", timeout=config.timeout_s, max_retries=0
        )

    def __repr__(self) -> str:
        return f"ChatClient(model={self.config.model!r}, endpoint={self._address!r})"

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def complete(self, messages: Sequence[dict[str, str]]) -> Completion:
        """The model's answer to `messages` (dicts with ``role`` and ``content``).

        429, 5xx, time-outs and lost connections are tried again, `config.retries` times, with exponential backoff and
        jitter or as Retry-After says. Raises MissingResource when the endpoint can't be reached, or refuses the key or
        the model; RequestRefused for any other 4xx.
        """
        import openai
        from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

        def announce(state: RetryCallState) -> None:
            wait = state.next_action.sleep if state.next_action else 0.0
            log.warning("%s; request %d follows in %.1f s", self._cause(state), state.attempt_number + 1, wait)

        retrying = Retrying(
            stop=stop_after_attempt(self.config.retries + 1),
            wait=_wait,
            retry=retry_if_exception(_is_passing),
            before_sleep=announce,
            reraise=True,
        )
        started = time.perf_counter()
        response, failure = None, None
        try:
            response = retrying(self._request, list(messages))
        except openai.OpenAIError as error:
            failure = self._refusal(error, retrying.statistics.get("attempt_number", 1))
        except ValueError as error:
            failure = self._no_chat(str(error))
        if failure is not None:  # raised out here, so that the cause, whose request holds the key, is not chained to it
            raise failure
        choices = getattr(response, "choices", None)
        if not choices or getattr(choices[0], "message", None) is None:
            raise self._no_chat("no 'choices' in the answer")
        usage = getattr(response, "usage", None)
        return Completion(
            text=_THINKING.sub("", choices[0].message.content or "").strip(),
            prompt_tokens=getattr(usage, "prompt_tokens", None),
            completion_tokens=getattr(usage, "completion_tokens", None),
            seconds=time.perf_counter() - started,
            retries=retrying.statistics.get("attempt_number", 1) - 1,
            finish_reason=choices[0].finish_reason or "",
        )

    def complete_json(self, messages: Sequence[dict[str, str]], schema: type[R]) -> tuple[R, Completion]:
        """The answer as a record of `schema`, whose JSON schema is added to the last message.

        Fences, prose around the JSON and small syntax errors are tolerated. An answer that can't be read is shown to
        the model once with what is wrong; tokens and seconds of both tries are added up. Raises UnparsedAnswer.
        """
        asked = _with_schema(messages, schema)
        first = self.complete(asked)
        try:
            return parse_json(first.text, schema), first
        except UnparsedAnswer as error:
            problem = str(error)
        again = "That can't be read: " + problem + "\nAnswer again with the JSON object alone, without any other text."
        second = self.complete(
            [*asked, {"role": "assistant", "content": first.text}, {"role": "user", "content": again}]
        )
        total = Completion(
            text=second.text,
            prompt_tokens=_sum(first.prompt_tokens, second.prompt_tokens),
            completion_tokens=_sum(first.completion_tokens, second.completion_tokens),
            seconds=first.seconds + second.seconds,
            retries=first.retries + second.retries + 1,
            finish_reason=second.finish_reason,
        )
        try:
            return parse_json(second.text, schema), total
        except UnparsedAnswer as error:
            cut = f" (llm.max_tokens = {self.config.max_tokens} cut it off)" if total.finish_reason == "length" else ""
            raise UnparsedAnswer(f"model '{self.config.model}', second try: {error}{cut}", total) from None

    def _request(self, messages: list[dict[str, str]]) -> Any:
        return self._client.chat.completions.create(
            model=self.config.model,
            messages=messages,  # type: ignore[arg-type]
            temperature=self.config.temperature,
            max_tokens=self.config.max_tokens,
        )

    def _scrub(self, text: object) -> str:
        plain = " ".join(str(text).split())
        return (plain.replace(self._key, "***") if self._key else plain)[:300]

    def _cause(self, state: Any) -> str:
        return self._scrub(f"chat endpoint {self._address}: {_reason(state.outcome.exception())}")

    def _no_chat(self, detail: str) -> MissingResource:
        return MissingResource(
            f"{self._address} answers, but not in the OpenAI chat protocol ({self._scrub(detail)}). "
            "RAGBUILD_LLM_BASE_URL takes the address above /chat/completions, which mostly ends in /v1."
        )

    def _refusal(self, error: Exception, attempts: int) -> RagbuildError:
        """What to raise for an error of the client, in words and without the key."""
        import openai

        reason, status = self._scrub(_reason(error)), getattr(error, "status_code", None)
        if isinstance(error, openai.APIResponseValidationError):
            return self._no_chat(reason)
        if _may_pass(error):
            return MissingResource(
                f"the chat endpoint {self._address} can't be had after {attempts} request(s): {reason}. Start it, or "
                "set RAGBUILD_LLM_BASE_URL to another; llm.retries and llm.timeout_s say how long is waited. Without "
                "an endpoint: generate.generator=extractive."
            )
        if status in (401, 403):
            key = "this key" if self._key else "a request without a key"
            return MissingResource(f"{self._address} refuses {key}: {reason}. Set RAGBUILD_LLM_API_KEY.")
        if status == 404:
            return MissingResource(
                f"{self._address} knows no model '{self.config.model}', or is no chat endpoint: {reason}. Set "
                "llm.model to a model that it serves, or RAGBUILD_LLM_BASE_URL to an address that mostly ends in /v1."
            )
        return RequestRefused(
            f"{self._address} refuses the request to model '{self.config.model}': {reason}. If it is too long, lower "
            "rerank.top_m or llm.max_tokens."
        )


def parse_json(text: str, schema: type[R]) -> R:
    """The first JSON object in `text` that fits `schema`, fenced or among prose; json_repair mends what is broken.

    Raises UnparsedAnswer with what is wrong.
    """
    problems: list[str] = []
    for data in _objects(text):
        try:
            return schema.model_validate(data)
        except ValidationError as error:
            problems.append("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()))
    problem = problems[0] if problems else "no JSON object in it"
    raise UnparsedAnswer(f"expected JSON of {schema.__name__}, got {' '.join(text.split())[:120]!r}: {problem}")


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of `text`, likeliest first: as a strict reader sees them, mended by json_repair, any other.

    An object inside of a broken one comes last: it would pass for the whole where a schema has defaults.
    """
    import json_repair

    blocks = [block for block in (*_FENCE.findall(text), text) if "{" in block]
    blocks = [block[block.index("{") :] for block in blocks]
    later = [text[match.start() :] for match in re.finditer(r"\{", text)][1:20]
    for read, candidates in ((_strict, blocks), (json_repair.loads, blocks), (_strict, later)):
        for candidate in candidates:
            try:
                data = read(candidate)
            except (ValueError, RecursionError):
                continue
            data = data[0] if isinstance(data, list) and len(data) == 1 else data
            if isinstance(data, dict):
                yield data


def _strict(text: str) -> Any:
    return json.JSONDecoder().raw_decode(text)[0]  # what follows the object is left alone


def _with_schema(messages: Sequence[dict[str, str]], schema: type[BaseModel]) -> list[dict[str, str]]:
    if not messages:
        raise UsageError("a chat takes at least one message, got none")
    form = json.dumps(schema.model_json_schema(), ensure_ascii=False)
    ask = f"Answer with one JSON object that fits this JSON schema, and nothing else:\n{form}"
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{ask}"}]


def _sum(*counts: int | None) -> int | None:
    known = [c for c in counts if c is not None]
    return sum(known) if known else None


def _address(base_url: str | None) -> str:
    """The endpoint's address as it may be shown: no query."""
    if not base_url:
        raise MissingResource(
            "no chat endpoint is set: export RAGBUILD_LLM_BASE_URL=https://…/v1 (any OpenAI-compatible one, a local "
            "one too) and, where it wants a key, RAGBUILD_LLM_API_KEY. Without one: generate.generator=extractive."
        )
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError("RAGBUILD_LLM_BASE_URL must be an address such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password:  # they would stand in every log line that names the address
        raise UsageError("RAGBUILD_LLM_BASE_URL must hold no user name or password; RAGBUILD_LLM_API_KEY takes the key")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{f':{port}' if port else ''}{parts.path.rstrip('/')}"


def _reason(error: BaseException) -> str:
    status = getattr(error, "status_code", None)
    if status is not None:
        return f"HTTP {status}: {getattr(error, 'message', error)}"
    cause = f" ({error.__cause__})" if error.__cause__ else ""
    return f"{type(error).__name__}: {error}{cause}"


def _may_pass(error: BaseException) -> bool:
    """429, 408, 5xx, time-outs and connection errors; nothing else is worth a second request."""
    import openai

    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)  # its subclass APITimeoutError too


def _is_passing(error: BaseException) -> bool:
    return _may_pass(error) and (_retry_after(error) or 0.0) <= MAX_WAIT_S


def _retry_after(error: BaseException) -> float | None:
    """Seconds of the Retry-After header (a number or an HTTP date, RFC 9110 section 10.2.3); None without one."""
    value = getattr(getattr(error, "response", None), "headers", {}).get("retry-after")
    if value is None:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)


def _wait(state: Any) -> float:
    """What the endpoint asks for, else 0.5, 1, 2, 4 … 20 s with up to 0.5 s of jitter (tenacity's)."""
    from tenacity import wait_exponential_jitter

    asked = _retry_after(state.outcome.exception())
    return asked if asked is not None else wait_exponential_jitter(multiplier=0.5, max=20, jitter=0.5)(state)
