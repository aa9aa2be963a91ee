"""OpenAI's ``/v1/responses``: requests, items of conversations, the response object and its events."""

from ctxreuse.daemon.responses.answer import (
    FunctionCall,
    OutputMessage,
    ResponseFailure,
    ResponseObject,
    response_usage,
)
from ctxreuse.daemon.responses.events import OutputWriter, named_event
from ctxreuse.daemon.responses.items import Item, check_outputs, input_items, latest, messages_of
from ctxreuse.daemon.responses.request import InputItem, ResponsesRequest, chat_fields

__all__ = [
    "FunctionCall",
    "InputItem",
    "Item",
    "OutputMessage",
    "OutputWriter",
    "ResponseFailure",
    "ResponseObject",
    "ResponsesRequest",
    "chat_fields",
    "check_outputs",
    "input_items",
    "latest",
    "messages_of",
    "named_event",
    "response_usage",
]
