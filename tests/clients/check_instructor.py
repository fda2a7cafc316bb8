"""instructor: pydantic models out of answers, in its modes for OpenAI's and Anthropic's clients; streamed parts; lists."""

from __future__ import annotations

from typing import Annotated, Any

import instructor
import openai
from harness import Target, check, main, refused
from pydantic import BaseModel, Field

ASK: Any = [{"role": "user", "content": "Tell me about the city of Paris."}]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=9999)
    rivers: list[Annotated[str, Field(max_length=10)]] = Field(max_length=1)


def plain(t: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=t.url + "/v1", api_key=t.key, max_retries=0, timeout=60)


MODES = [getattr(instructor.Mode, name) for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA") if hasattr(instructor.Mode, name)]


@check()
def modes(t: Target) -> None:
    for mode in MODES:
        client = instructor.from_openai(plain(t), mode=mode)
        city, answer = client.chat.completions.create_with_completion(
            model=t.model, messages=ASK, response_model=City, temperature=0, max_tokens=150, max_retries=0
        )
        assert isinstance(city, City) and answer.usage.completion_tokens, mode


@check()
def streamed_parts(t: Target) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain(t), mode=mode)
        parts = list(
            client.chat.completions.create_partial(model=t.model, messages=ASK, response_model=City, temperature=0, max_tokens=150)
        )
        assert len(parts) > 1 and City.model_validate(parts[-1].model_dump()), mode


@check()
async def asynchronously(t: Target) -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=t.url + "/v1", api_key=t.key, max_retries=0), mode=instructor.Mode.TOOLS)
    assert isinstance(await client.create(model=t.model, messages=ASK, response_model=City, temperature=0, max_tokens=150), City)


@check()
def anthropic_tools(t: Target) -> None:
    import anthropic

    client = instructor.from_anthropic(anthropic.Anthropic(base_url=t.url, api_key=t.key, max_retries=0))
    city = client.create(model=t.model, messages=ASK, response_model=City, max_tokens=150, extra_body={"temperature": 0}, max_retries=0)
    assert isinstance(city, City)


@check()
def errors(t: Target) -> None:
    client = instructor.from_openai(plain(t), mode=instructor.Mode.TOOLS)
    error = refused(Exception, lambda: client.create(model="nope", messages=ASK, response_model=City, max_retries=0))
    assert "nope" in str(error) and "404" in str(error)


if __name__ == "__main__":
    main("instructor", "openai")
