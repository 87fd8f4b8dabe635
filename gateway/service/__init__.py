"""One request from start to end: strategy, route, call, time, record. Knows nothing of the web framework."""

from gateway.service.call import Body, Call
from gateway.service.chat import BACKEND_HEADER, ChatService
from gateway.service.exchange import Exchange, Outcome
from gateway.service.exchange_headers import headers_of

__all__ = ["BACKEND_HEADER", "Body", "Call", "ChatService", "Exchange", "Outcome", "headers_of"]
