"""From a chat request to a job: parameters, prompt, and how its answers are read. Chat, responses and messages all pass here."""

from __future__ import annotations

import msgspec

from octavo.errors import RequestError
from octavo.frontend.parsers import REASONING_PARSERS
from octavo.frontend.parsers.reasoning import Beginning, ReasoningParser
from octavo.frontend.structured import StructuredOutput
from octavo.server.answers import AnswerPlan
from octavo.server.context import ServerContext
from octavo.server.forced_tools import forced_call_schema
from octavo.server.generation import Job
from octavo.server.model_parsers import ModelParsers, check_parsers
from octavo.server.prompts import chat_prompt, text_content
from octavo.server.sampling import beam_params, chat_params
from octavo.server.schemas import ChatRequest
from octavo.server.thinking import EFFORT_BUDGETS, thinking_of
from octavo.server.tools import tool_use


async def chat_job(request: ChatRequest, context: ServerContext, response_id: str, start: float) -> Job:
    """RequestError, naming the field, for what can't be honoured."""
    model = context.check_model(request.model)
    params = chat_params(request, context)
    use = tool_use(request)
    check_parsers(context.parsers, use, context.options)
    forced = forced_call_schema(use) if use.mode == "required" else None
    if forced is not None:
        if params.structured_outputs is not None:
            raise RequestError("A forced tool call and response_format (structured output) exclude each other.", param="tool_choice")
        if context.parsers.reasoning == "gpt_oss":
            raise RequestError("tool_choice can't force calls of this model yet; use auto.", param="tool_choice")
        schema = msgspec.json.encode(forced.schema).decode()
        params = msgspec.structs.replace(params, structured_outputs=StructuredOutput("json_schema", schema, "tools"))
    prompt = await chat_prompt(request, context, use.offered)
    parsers = context.parsers if use.callable else ModelParsers(None, context.parsers.reasoning)
    beginning = _beginning(request, parsers.reasoning)
    plan = AnswerPlan(
        parsers,
        use,
        forced,
        request.include_reasoning is not False,
        request.streams and not context.options.stream_tool_arguments,
        prompt.text,
        beginning,
    )
    if plan.reads and (marks := context.kept_tokens(plan.markers)):
        params = msgspec.structs.replace(params, kept_special_tokens=marks)
    beams = beam_params(request, params)
    # a search takes the likeliest answer, its reasoning included: there is nothing to cut short
    thinking = None
    if beams is None:
        thinking = thinking_of(parsers.reasoning, prompt.text, _budget(request, context), params.structured_outputs, beginning)
    try:
        return Job(context, request, response_id, model, [prompt], params, start, plan=plan, thinking=thinking, beams=beams)
    except RequestError as error:
        if error.param == "prompt":  # what the engine knows as the prompt came as messages
            error.param = "messages"
        raise


def _beginning(request: ChatRequest, parser: str | None) -> Beginning | None:
    """An answer that goes on with the last message begins where that ends; others as the prompt says (None)."""
    kind = REASONING_PARSERS[parser] if parser is not None else None
    if not request.continue_final_message or kind is None or not issubclass(kind, ReasoningParser):
        return None
    text = text_content(request.messages[-1].content, "messages[-1].content") or ""
    return "open" if text.rfind(kind.start_tag) > text.rfind(kind.end_tag) else "closed"


def _budget(request: ChatRequest, context: ServerContext) -> int | None:
    """thinking_token_budget, else what the effort stands for where the template does not know the word."""
    budget = request.thinking_token_budget
    if budget is not None:
        if context.parsers.reasoning is None:
            raise RequestError(
                "thinking_token_budget needs a model whose reasoning this server can read (--reasoning-parser).",
                param="thinking_token_budget",
            )
        return budget
    if request.reasoning_effort is None or context.parsers.reasoning is None:
        return None
    source = getattr(context.engine.chat_template, "whole_source", None) or ""
    return None if "reasoning_effort" in source else EFFORT_BUDGETS.get(request.reasoning_effort)
