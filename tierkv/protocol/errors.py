"""What is wrong with bytes or fields that came over the wire.

    TierKVError
    └── ProtocolError   one request or answer is refused; the connection goes on
        └── FrameError  the bytes make no sense from here on; the connection ends

`code` is the wire's, set per instance: an answer carries it. Raised by frames.py, requests.py and
answers.py; caught by whoever holds the other end of the connection.
"""

from __future__ import annotations

from tierkv.protocol.messages import WireCode
from tierkv.storage.errors import TierKVError


class ProtocolError(TierKVError):
    """A request or an answer breaks the contract of messages.py."""

    def __init__(self, code: WireCode, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id
        """The request to answer; None when it is not known."""


class FrameError(ProtocolError):
    """No frame within the limits can be read; nothing after it is clear."""

    def __init__(self, message: str) -> None:
        super().__init__(WireCode.FRAME, message)
