"""Descriptions of the routes of ``app.py``: chat, completions, responses, messages and ``routes.py``; see ``openapi.py``."""

from __future__ import annotations

from octavo.server import answer_schemas as answers
from octavo.server import typed_schemas as typed
from octavo.server.messages_input import CountTokensRequest, MessagesRequest
from octavo.server.openapi import document
from octavo.server.responses_input import ResponsesRequest
from octavo.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

document(
    "POST",
    "/v1/chat/completions",
    summary="Answer a conversation.",
    request=ChatRequest,
    response=answers.ChatCompletion,
    stream=answers.ChatCompletionChunk,
)
document(
    "POST",
    "/v1/responses",
    summary="Answer a conversation, in OpenAI's newer API; stateless.",
    request=ResponsesRequest,
    response=typed.ResponseObject,
    stream=typed.ResponseEvent,
)
document(
    "POST",
    "/v1/messages",
    summary="Answer a conversation, in Anthropic's API.",
    request=MessagesRequest,
    response=typed.AnthropicMessage,
    stream=typed.MessageEvent,
    error=typed.AnthropicError,
)
document(
    "POST",
    "/v1/messages/count_tokens",
    summary="How many tokens such a conversation has.",
    request=CountTokensRequest,
    response=typed.CountedTokens,
    error=typed.AnthropicError,
)
document(
    "POST",
    "/v1/completions",
    summary="Continue texts or token ids.",
    request=CompletionRequest,
    response=answers.TextCompletion,
    stream=answers.TextCompletionChunk,
)
document("GET", "/v1/models", summary="The names to ask for.", response=answers.ModelList)
document("GET", "/v1/models/{name:path}", summary="One of them.", response=answers.ModelCard)
document(
    "POST",
    "/tokenize",
    summary="A text, or messages through the chat template, to token ids.",
    request=TokenizeRequest,
    response=answers.Tokenized,
)
document("POST", "/detokenize", summary="Token ids to text.", request=DetokenizeRequest, response=answers.Detokenized)
document("GET", "/health", summary="200 while the engine lives and answers, else 503.", response=answers.Health)
document("GET", "/ping", summary="The same without a body.", media=())
document("POST", "/ping", summary="The same without a body.", media=())
document("GET", "/load", summary="How many requests run or wait.", response=answers.Load)
document("GET", "/version", summary="Octavo's version.", response=answers.Version)
document("GET", "/metrics", summary="Metrics for Prometheus, under vLLM's names.", media=("text/plain",))
document("GET", "/", summary="What runs here, for people with a browser.", media=("text/plain", "text/html"))
