"""Define what a plan records of pipeline stages: their blocks, their times, and the bytes of their ranks.

Legend: seconds are predicted, of one micro-batch; stage s is on rank s mod the ranks of the model axis.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        first, end: Its blocks are first <= i < end.
        rank: Of the model axis.
        forward_seconds, backward_seconds: Of one micro-batch through it.
        send_forward_seconds: Of what its last block returns, to the next stage.
        send_backward_seconds: Of the gradient of what it was sent, to the stage before.
        peak_bytes: Of its rank.
        idle: Share of the schedule in which its rank computes nothing (the bubble).
        rest_seconds: Of the last stage: what it computes once, for the whole batch, before its first backward pass.
    """

    first: int
    end: int
    rank: int
    forward_seconds: float
    backward_seconds: float
    send_forward_seconds: float
    send_backward_seconds: float
    peak_bytes: int
    idle: float
    rest_seconds: float = 0.0
